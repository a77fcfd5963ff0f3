"""The Triton kernel before latent attention agrees with its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants_by

from moiety_kernels.checks import KernelInputError
from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.latent_input import LatentInputPlan, kernel, latent_input, reference
from moiety_kernels.rope.inputs import RotaryInputs

POSITIONS, BLOCKS, PLACES = 30, 6, 4


def poisoned(width: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """A cache with a block before it and one after it that are none of its, and the scales of its rows' two parts. int8
    knows no NaN."""
    shape = 1 + BLOCKS + 1, PLACES
    filler = 99 if dtype is torch.int8 else float("nan")
    return (
        torch.full((*shape, width), filler, device=device).to(dtype),
        torch.full((2, *shape), float("nan"), device=device),
    )


def assert_agrees(
    kernels: Any,
    tokens: int,
    widths: tuple[int, int, int],
    dtype: torch.dtype,
    kept: torch.dtype,
    device: str,
    *,
    normed: bool = True,
) -> None:
    """Of widths of queries, of latent rows, and of rotated pairs. Rows lie apart, so that what overruns one shows."""
    query, latent, pairs = widths
    x = torch.randn(tokens, query + latent + 2 * pairs + 5, device=device).to(dtype)[:, :-5]
    x[0, query:] = 0.0
    x[-1, query + latent] = 1000.0
    plan = LatentInputPlan(
        torch.rand(latent, device=device) + 0.5, torch.rand(query, device=device) + 0.5 if normed else None, 1e-6
    )
    angles = torch.rand(POSITIONS, pairs, device=device) * 6
    positions = torch.randint(0, POSITIONS, (tokens,), device=device)
    slots = torch.randperm(BLOCKS * PLACES)[:tokens]
    slots[1::3] = -1  # slots of padding tokens
    made = []
    for some in (kernels, reference):
        cache, scales = poisoned(latent + 2 * pairs, kept, device)
        inside = (cache[1:-1], *(scales[:, 1:-1] if kept is torch.int8 else (None, None)))
        rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
        held = LatentCache(inside[0], latent, *inside[1:])
        out = some.latent_input(x.clone(), plan, rotary, held, slots.to(device))
        made.append((out, cache, scales))
    rounded = {torch.float8_e4m3fn: 0.07, torch.int8: 1.01, torch.float16: 4e-3}.get(kept, 1e-5)
    for ours, theirs, tolerance in zip(*made, (4e-3 if dtype is torch.float16 else 1e-5, rounded, 4e-3), strict=True):
        difference = {"rtol": 0.0 if ours.dtype is torch.int8 else tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(ours.float(), theirs.float(), **difference)
    if kept.itemsize == 1:  # except where float32's last bit decides
        ours, theirs = (cache.float().nan_to_num(9.0) for _, cache, _ in made)
        assert (ours != theirs).float().mean() < 0.02


KEPT = [
    (torch.float32, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float8_e4m3fn),
    (torch.float32, torch.int8),
    (torch.float16, torch.int8),
]


@pytest.mark.parametrize(("dtype", "kept"), KEPT, ids=str)
@pytest.mark.parametrize("widths", [(48, 32, 8), (1536, 512, 32), (20, 10, 3)], ids=str)
@pytest.mark.parametrize("tokens", [1, 7])
def test_a_row_is_made_ready(
    tokens: int, widths: tuple[int, int, int], dtype: torch.dtype, kept: torch.dtype, device: str
) -> None:
    assert_agrees(kernel, tokens, widths, dtype, kept, device)


def test_queries_without_a_latent_row_are_left_as_they_are(device: str) -> None:
    assert_agrees(kernel, 7, (24, 20, 5), torch.float32, torch.float32, device, normed=False)


def test_no_tokens_are_no_work(device: str) -> None:
    plan, (cache, _) = LatentInputPlan(torch.ones(8, device=device), None, 1e-6), poisoned(12, torch.float32, device)
    none, table = torch.empty(0, dtype=torch.int64, device=device), torch.ones(POSITIONS, 2, device=device)
    x = torch.empty(0, 20, device=device)
    assert kernel.latent_input(x, plan, RotaryInputs(table, table, none), LatentCache(cache, 8), none).shape == (0, 8)


def test_whole_numbers_without_scales_are_refused(device: str) -> None:
    plan, (cache, _) = LatentInputPlan(torch.ones(8, device=device), None, 1e-6), poisoned(12, torch.int8, device)
    one, table = torch.zeros(1, dtype=torch.int64, device=device), torch.ones(POSITIONS, 2, device=device)
    rotary = RotaryInputs(table, table, one)
    with pytest.raises(KernelInputError, match="an int8 cache, and no other, has scales"):
        latent_input(torch.ones(1, 20, device=device), plan, rotary, LatentCache(cache, 8), one)


def test_addresses_go_beyond_32_bits(untouched: Any, device: str) -> None:
    """The offsets are those of blocks of the cache and of rows."""
    width, apart = 12, 1 << 31
    plan = LatentInputPlan(torch.ones(8, device=device), torch.ones(6, device=device), 1e-6)
    angles = torch.rand(POSITIONS, 2, device=device)
    far = untouched(apart + 2 * PLACES * width, torch.float16).as_strided((2, PLACES, width), (apart, width, 1))
    rows = untouched(apart + 18, torch.float16).as_strided((2, 18), (apart, 1))
    x = rows.copy_(torch.randn(2, 18))
    near = torch.zeros(2, PLACES, width, dtype=torch.float16, device=device)
    rotary = RotaryInputs(angles.cos(), angles.sin(), torch.tensor([3, 7], device=device))
    slots_T = torch.tensor([1, PLACES + 2], device=device)
    ours = kernel.latent_input(x, plan, rotary, LatentCache(far, 8), slots_T)
    theirs = reference.latent_input(x.clone(), plan, rotary, LatentCache(near, 8), slots_T)
    torch.testing.assert_close(ours, theirs, rtol=4e-3, atol=4e-3)
    for block, place in ((0, 1), (1, 2)):
        torch.testing.assert_close(far[block, place], near[block, place], rtol=4e-3, atol=4e-3)


@mutants_by(
    "kept",
    {
        torch.float32: {
            "m_column = i_column < WIDTH\n": "m_column = i_column < WIDTH + 1\n",
            "/ WIDTH + eps": "/ (WIDTH + 1) + eps",
            "p_row + QUERY, p_latent_norm": "p_row, p_latent_norm",
            "(b * cos + a * sin)": "(b * cos - a * sin)",
            "block * cache_block + place * cache_place": "place * cache_place",
            "if slot < 0:": "if slot < -1:",
            "p_out + i_token * QUERY": "p_out",
            "tl.load(p_positions + i_token)": "tl.load(p_positions)",
            "kept(second, p_target)": "kept(first, p_target)",
        },
        torch.int8: {
            "_whole(second, rotated_scale)": "_whole(second, latent_scale)",
            "block * places + place": "block + place",
            "tl.maximum(tl.abs(first.to(tl.float32)), ": "(tl.abs(first.to(tl.float32)) * 0 + ",
        },
    },
)
def test_a_mutant_is_found(failing_mutant: FailingMutant, kept: torch.dtype, edit: Edit, device: str) -> None:
    with failing_mutant(kernel, edit) as mutant:
        assert_agrees(mutant, 7, (48, 33, 8), torch.float32, kept, device)
