"""The Triton kernel between the fused projection and attention agrees with its definition, and so do its parts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants

from moiety_kernels.attention_input import AttentionInputPlan, kernel, reference
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.kv_store.reference import kv_store
from moiety_kernels.rope.inputs import RotaryInputs
from moiety_kernels.rope.reference import rope

POSITIONS, BLOCKS, PLACES = 30, 6, 4


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Assert that values are equal except for rounding, and NaN at the same places."""
    tolerance = 4e-3 if theirs.dtype is torch.float16 else 1e-5
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance, equal_nan=True)


def poisoned_caches(kv_heads: int, width: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """Both caches, with a block before each and one after it that are none of theirs."""
    shape = 2, 1 + BLOCKS + 1, kv_heads, PLACES, width
    return torch.full(shape, float("nan"), dtype=dtype, device=device)


def tables(pairs: int, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    angles = torch.rand(POSITIONS, pairs, device=device) * 6
    return angles.cos(), angles.sin()


def random_positions(tokens: int, pairs: int, device: str) -> RotaryInputs:
    return RotaryInputs(*tables(pairs, device), torch.randint(0, POSITIONS, (tokens,), device=device))


def some_slots(tokens: int, device: str) -> torch.Tensor:
    """Return distinct slots, except for padding tokens."""
    slots = torch.randperm(BLOCKS * PLACES)[:tokens]
    slots[1::3] = -1
    return slots.to(device)


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention layer: heads of queries and of keys, their width, rotated pairs, kind of norm, and clip."""

    heads: tuple[int, int]
    width: int
    pairs: int
    norm: str
    clip: float | None


def assert_agrees(kernels: Any, tokens: int, layer: Layer, dtype: torch.dtype, device: str) -> None:
    heads, width = layer.heads, layer.width
    fused = (heads[0] + 2 * heads[1]) * width
    qkv = torch.randn(tokens, fused + 5, device=device).to(dtype)[:, :fused]
    rotates_first = layer.norm == "head of rotated"
    sizes = {"none": None, "row": (heads[0] * width, heads[1] * width)}.get(layer.norm, (width, width))
    q_norm, k_norm = (None, None) if sizes is None else (torch.rand(size, device=device) + 0.5 for size in sizes)
    plan = AttentionInputPlan(q_norm, k_norm, norm_eps=1e-6, clip=layer.clip, rotates_first=rotates_first)
    rotary, slots = random_positions(tokens, layer.pairs, device), some_slots(tokens, device)
    ours, theirs = (poisoned_caches(heads[1], width, dtype, device) for _ in range(2))
    q_ours = kernels.attention_input(qkv, plan, rotary, LayerCache(*ours[:, 1:-1]), slots)
    assert_close(q_ours, reference.attention_input(qkv, plan, rotary, LayerCache(*theirs[:, 1:-1]), slots))
    assert_close(ours, theirs)


@pytest.mark.parametrize("value_width", [16, 48])
def test_values_may_have_a_width_and_a_norm_of_their_own(value_width: int, device: str) -> None:
    tokens, heads, kv_heads, width = 7, 6, 2, 32
    qkv = torch.randn(tokens, heads * width + kv_heads * (width + value_width), device=device)
    plan = AttentionInputPlan(norm_eps=1e-6, v_norm=torch.rand(value_width, device=device) + 0.5)
    rotary = random_positions(tokens, 8, device)
    ours, theirs = (
        [poisoned_caches(kv_heads, one, torch.float32, device)[0, 1:-1] for one in (width, value_width)]
        for _ in range(2)
    )
    slots = some_slots(tokens, device)
    q_ours = kernel.attention_input(qkv, plan, rotary, LayerCache(*ours), slots)
    assert_close(q_ours, reference.attention_input(qkv, plan, rotary, LayerCache(*theirs), slots))
    for found, wanted in zip(ours, theirs, strict=True):
        assert_close(found, wanted)


def assert_whole_numbers_agree(kernels: Any, device: str) -> None:
    """Keys and values in int8, each by its scale: the numbers are the same but for what lies halfway between two."""
    heads, width = (6, 3), 20
    qkv = torch.randn(7, (heads[0] + 2 * heads[1]) * width, device=device)
    qkv[0] = 0.0
    plan = AttentionInputPlan(torch.rand(width, device=device), torch.rand(width, device=device), norm_eps=1e-6)
    rotary, slots = random_positions(7, 8, device), some_slots(7, device)
    shape = 2, 1 + BLOCKS + 1, heads[1], PLACES, width
    made = []
    for some in (kernels, reference):
        numbers = torch.full(shape, -128, dtype=torch.int8, device=device)
        scales = torch.full(shape[:-1], float("nan"), device=device)
        cache = LayerCache(*numbers[:, 1:-1], *scales[:, 1:-1])
        some.attention_input(qkv, plan, rotary, cache, slots)
        made.append((numbers.int(), scales))
    (ours, our_scales), (theirs, their_scales) = made
    assert_close(our_scales, their_scales)
    assert int((ours - theirs).abs().max()) <= 1
    assert (ours != theirs).float().mean() < 0.01
    assert int(theirs[theirs > -128].abs().max()) == 127


def test_keys_and_values_are_kept_as_whole_numbers_by_scales_of_their_own(device: str) -> None:
    assert_whole_numbers_agree(kernel, device)
    k, v = torch.randn(2, 5, 3, 20, device=device)
    slots, made = torch.tensor([3, 7, -1, 11, 0], device=device), []
    for store in (kernel.kv_store, kv_store):
        numbers = torch.zeros(2, BLOCKS, 3, PLACES, 20, dtype=torch.int8, device=device)
        scales = torch.zeros(2, BLOCKS, 3, PLACES, device=device)
        store(k, v, LayerCache(*numbers, *scales), slots)
        made.append(numbers * scales[..., None])
    assert_close(*made)
    kept = made[0][0][[0, 1], :, 3]  # of the first two tokens
    assert ((kept - k[:2]).abs() <= k[:2].abs().amax(-1, keepdim=True) / 127 / 2 + 1e-6).all()


def assert_float8_agrees(kernels: Any, device: str) -> None:
    """Keys and values in float8, with some that it has no number for."""
    qkv = torch.randn(7, 12 * 20, device=device) * 200
    rotary, slots, made = random_positions(7, 8, device), some_slots(7, device), []
    for some in (kernels, reference):
        caches = poisoned_caches(3, 20, torch.float8_e4m3fn, device)
        some.attention_input(qkv, AttentionInputPlan(), rotary, LayerCache(*caches[:, 1:-1]), slots)
        made.append(caches.float())
    ours, theirs = made
    torch.testing.assert_close(ours, theirs, rtol=0.07, atol=1e-2, equal_nan=True)
    assert (ours.nan_to_num(9.0) != theirs.nan_to_num(9.0)).float().mean() < 0.01
    assert float(theirs[~theirs.isnan()].max()) == torch.finfo(torch.float8_e4m3fn).max


def test_keys_and_values_are_kept_in_float8(device: str) -> None:
    assert_float8_agrees(kernel, device)


def test_a_mutant_that_keeps_float8_otherwise_is_found(failing_mutant: FailingMutant, device: str) -> None:
    with failing_mutant(kernel, ("-448.0, 448.0", "-300.0, 300.0")) as mutant:
        assert_float8_agrees(mutant, device)


LAYERS = [
    Layer((4, 1), 8, 4, "none", None),
    Layer((4, 2), 20, 10, "head", None),
    Layer((6, 2), 16, 3, "head", 0.5),
    Layer((5, 1), 20, 6, "head of rotated", None),
    Layer((3, 3), 24, 12, "row", 0.7),
    Layer((40, 5), 64, 32, "none", None),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("tokens", [1, 7])
@pytest.mark.parametrize("layer", LAYERS)
def test_a_token_is_made_ready(tokens: int, layer: Layer, dtype: torch.dtype, device: str) -> None:
    assert_agrees(kernel, tokens, layer, dtype, device)


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    """The offsets are those of a token's row and of blocks of the caches."""
    heads, width, apart = (4, 2), 8, 1 << 31
    fused, positions = (heads[0] + 2 * heads[1]) * width, torch.tensor([3, 7], device=device)
    near = torch.randn(2, fused, device=device).half()
    qkv = untouched(apart + fused, torch.float16).as_strided((2, fused), (apart, 1)).copy_(near)
    rotary, slots = RotaryInputs(*tables(4, device), positions), torch.tensor([1, PLACES + 2], device=device)
    shape, strides = (2, heads[1], PLACES, width), (apart, PLACES * width, width, 1)
    size = apart + heads[1] * PLACES * width
    ours = [untouched(size, torch.float16).as_strided(shape, strides) for _ in range(2)]
    theirs = [torch.zeros(shape, dtype=torch.float16, device=device) for _ in range(2)]
    q_ours = kernel.attention_input(qkv, AttentionInputPlan(), rotary, LayerCache(*ours), slots)
    assert_close(q_ours, reference.attention_input(near, AttentionInputPlan(), rotary, LayerCache(*theirs), slots))
    for far, close in zip(ours, theirs, strict=True):
        for block, place in ((0, 1), (1, 2)):
            assert_close(far[block, :, place], close[block, :, place])


def test_no_tokens_are_no_work(device: str) -> None:
    cache = LayerCache(*poisoned_caches(1, 8, torch.float32, device)[:, 1:-1])
    none = torch.empty(0, dtype=torch.int64, device=device)
    rotary = RotaryInputs(*tables(4, device), none)
    q = kernel.attention_input(torch.empty(0, 32, device=device), AttentionInputPlan(), rotary, cache, none)
    assert q.shape == (0, 2, 8)


def test_heads_are_rotated_where_they_lie(device: str) -> None:
    cos, sin = tables(6, device)
    x, positions = torch.randn(5, 3, 20, device=device)[:, :, 4:], torch.randint(0, POSITIONS, (5,), device=device)
    assert_close(kernel.rope(x, cos, sin, positions), rope(x, cos, sin, positions))


def test_keys_and_values_are_stored_as_they_are(device: str) -> None:
    k, v = torch.randn(2, 5, 3, 20, device=device)
    ours, theirs = (poisoned_caches(3, 20, torch.float32, device) for _ in range(2))
    slots = some_slots(5, device)
    kernel.kv_store(k, v, LayerCache(*ours[:, 1:-1]), slots)
    kv_store(k, v, LayerCache(*theirs[:, 1:-1]), slots)
    assert_close(ours, theirs)


@mutants(
    {
        "block * kv_heads * places + place": "block * kv_heads * places",
        "p_scale + i_head * scale_head": "p_scale + i_head",
        "_largest(second)), _largest(rest))": "_largest(second)), 0.0)",
        "scale[:, None]) + 0.5)": "scale[:, None]))",
        "p_v_scale + first_scale": "p_k_scale + first_scale",
    }
)
def test_a_mutant_that_keeps_whole_numbers_otherwise_is_found(
    failing_mutant: FailingMutant, edit: Edit, device: str
) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_whole_numbers_agree(mutant, device)


@mutants(
    {
        "tl.where(slot < 0, 0, kv_heads)": "kv_heads",
        "total / WIDTH + eps": "total / (2 * PAIRS) + eps",
        "(b * cos + a * sin)": "(b * cos - a * sin)",
        "block * v_block + place * v_place": "block * v_block",
        "(i_head < held)[:, None] & (i_rest <": "(i_head < 1)[:, None] & (i_rest <",
        "clamped(first, clip), clamped(second, clip)": "clamped(first, clip), second",
        "p_positions + i_token": "p_positions",
    }
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_agrees(mutant, 7, Layer((6, 2), 16, 3, "head", 0.5), torch.float32, device)
