"""The kernels chosen for this machine agree with their references: odd shapes, fresh inputs, poisoned memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from moiety_kernels.attention_input import AttentionInputPlan, attention_input
from moiety_kernels.attention_input.reference import attention_input as attention_input_reference
from moiety_kernels.checks import KernelInputError
from moiety_kernels.head_linear import head_linear
from moiety_kernels.head_linear.reference import head_linear as head_linear_reference
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input import LatentInputPlan, latent_input, latent_queries
from moiety_kernels.latent_input import reference as latent_reference
from moiety_kernels.lightning_indexer import select_tokens, store_index_keys
from moiety_kernels.lightning_indexer.norm import IndexKeyNorm
from moiety_kernels.lightning_indexer.reference import select_tokens as select_tokens_reference
from moiety_kernels.linear import linear
from moiety_kernels.linear.reference import linear as linear_reference
from moiety_kernels.mla_attention import mla_attention
from moiety_kernels.mla_attention.reference import mla_attention as mla_attention_reference
from moiety_kernels.moe import dense_glu, experts
from moiety_kernels.moe import grouped as experts_grouped
from moiety_kernels.moe.reference import experts as experts_reference
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.batched import paged_attention as paged_attention_batched
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.paged_attention.reference import paged_attention as paged_attention_reference
from moiety_kernels.rms_norm.reference import rms_norm as rms_norm_reference
from moiety_kernels.rope import rope
from moiety_kernels.rope.inputs import RotaryInputs
from moiety_kernels.route import RoutingSpec, route
from moiety_kernels.route.reference import route as route_reference

from .conftest import Paged
from .reference_checks import CACHES, DEVICE, WEIGHTS, close, normal, poisoned_memory, same_numbers_every_time

__all__ = ["poisoned_memory", "same_numbers_every_time"]  # fixtures

pytestmark = pytest.mark.usefixtures("several_threads")
ROUNDING = ("tiles", "packed", "arm_pairs")  # ways that round rows to bfloat16


@pytest.mark.combinations(by=("arithmetic",))
@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 6, 11, 12, 13, 16, 17, 47, 97, 200])
@pytest.mark.parametrize(("n", "k"), [(1, 16), (7, 64), (33, 48), (130, 320), (515, 1024), (40, 2080), (20, 50)])
@pytest.mark.usefixtures("arithmetic")
def test_linear(rows: int, n: int, k: int, dtype: torch.dtype) -> None:
    x, weight, bias = normal(rows, k).bfloat16().float(), normal(n, k, scale=k**-0.5).to(dtype), normal(n)
    assert close(linear(x, weight), linear_reference(x, weight))
    assert close(linear(x, weight, bias), linear_reference(x, weight, bias))


def test_rows_are_rounded_to_the_nearest_bfloat16_where_that_is_what_is_multiplied(arithmetic: str) -> None:
    x, weight = normal(40, 64, scale=3), torch.eye(64, dtype=torch.bfloat16, device=DEVICE)
    assert torch.equal(linear(x, weight), x.bfloat16().float() if arithmetic in ROUNDING else x)


@pytest.mark.parametrize(("n", "k"), [(40, 64), (5, 96), (515, 1024), (270, 3104)])
@pytest.mark.usefixtures("arithmetic")
def test_a_rows_product_does_not_depend_on_its_neighbours(n: int, k: int) -> None:
    x, weight = normal(113, k), normal(n, k, scale=k**-0.5).bfloat16()
    together = linear(x, weight)
    for rows in (1, 2, 4, 5, 16, 33):
        assert torch.equal(linear(x[40 : 40 + rows], weight), together[40 : 40 + rows])


def test_rows_of_any_length_are_multiplied() -> None:
    x, weight = normal(3, 1 << 16).bfloat16().float(), normal(20, 1 << 16, scale=2**-8).bfloat16()
    assert close(linear(x, weight), linear_reference(x, weight))


def test_linear_takes_rows_with_a_stride() -> None:
    x, weight = normal(9, 200)[:, 16:144], normal(40, 128)
    assert close(linear(x, weight), linear_reference(x, weight))


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize(
    ("rows", "heads", "n", "k"), [(1, 3, 40, 32), (5, 16, 512, 128), (130, 2, 33, 64), (9, 4, 7, 20)]
)
@pytest.mark.usefixtures("arithmetic")
def test_head_linear(rows: int, heads: int, n: int, k: int, dtype: torch.dtype) -> None:
    x = normal(rows, heads, k + 16).bfloat16().float()[..., :k]  # as a part of each head's query stands
    weight = normal(heads, n, k, scale=k**-0.5).to(dtype)
    assert close(head_linear(x, weight), head_linear_reference(x, weight))


def test_linear_of_no_rows_is_empty() -> None:
    assert linear(normal(0, 64), normal(10, 64)).shape == (0, 10)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize(
    ("tokens", "num_experts", "top_k", "width", "hidden"),
    [
        (1, 4, 2, 64, 32),
        (3, 8, 3, 48, 16),
        (33, 5, 1, 128, 80),
        (250, 3, 2, 64, 96),
        (17, 4, 2, 40, 24),
        (90, 3, 2, 1056, 1088),
    ],
)
def test_experts(
    arithmetic: str, tokens: int, num_experts: int, top_k: int, width: int, hidden: int, dtype: torch.dtype
) -> None:
    x = normal(tokens, width).bfloat16().float()
    gate_up = normal(num_experts, 2 * hidden, width, scale=width**-0.5).to(dtype)
    down = normal(num_experts, width, hidden, scale=hidden**-0.5).to(dtype)
    weight, expert = route_reference(normal(tokens, num_experts), RoutingSpec(num_experts, top_k, renormalize=True))
    inner_is_rounded = arithmetic in ROUNDING and dtype is torch.bfloat16
    expected = experts_reference(x, weight, expert, gate_up, down)
    assert close(experts(x, weight, expert, gate_up, down), expected, 2**-8 if inner_is_rounded else 1e-5)


def test_experts_that_nobody_chose_are_never_read() -> None:
    x = normal(20, 64)
    gate_up, down = normal(4, 96, 64), normal(4, 64, 48)
    expert = torch.tensor([[0, 2]] * 20, dtype=torch.int32, device=DEVICE)
    weight = torch.full((20, 2), 0.5, device=DEVICE)
    expected = experts_reference(x, weight, expert, gate_up, down)
    for unused in (1, 3):
        gate_up[unused], down[unused] = float("nan"), float("nan")
    assert close(experts(x, weight, expert, gate_up, down), expected)


def test_large_gates_do_not_overflow() -> None:
    x = torch.eye(2, 16, device=DEVICE)
    w_gate_up, w_down = torch.zeros(32, 16, device=DEVICE), torch.eye(16, device=DEVICE)
    w_gate_up[0, 0], w_gate_up[16, 0], w_gate_up[1, 1], w_gate_up[17, 1] = 300.0, 1.0, -300.0, 1.0
    one = torch.ones(2, 1, device=DEVICE)
    chosen = torch.zeros(2, 1, dtype=torch.int32, device=DEVICE)
    ours = experts(x, one, chosen, w_gate_up[None], w_down[None])
    assert torch.allclose(ours, dense_glu(x, w_gate_up, w_down))
    assert ours[0, 0] == 300.0
    assert ours[1, 1].abs() < 1e-6


def converted(cache: LayerCache, dtype: torch.dtype) -> LayerCache:
    return LayerCache(cache.k_NGPd.to(dtype), cache.v_NGPd.to(dtype))


@pytest.mark.combinations(by=("kept",))
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (37, False), (37, True)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width"), [(4, 4, 16), (8, 2, 64), (5, 1, 48), (6, 2, 144), (4, 1, 256), (4, 2, 10)]
)
@pytest.mark.parametrize("places", [16, 5])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("kept", CACHES)
def test_paged_attention(
    paged: Paged,
    heads: int,
    kv_heads: int,
    width: int,
    places: int,
    window: int | None,
    chunked: bool,
    with_sinks: bool,
    kept: torch.dtype,
) -> None:
    queries, contexts = [1, 1, 7, 130, 40], [1, 300, 7, 150, 290]
    q, cache, metadata = paged(queries, contexts, heads, kv_heads, width, places)
    sinks = normal(heads, scale=3) if with_sinks else None
    inputs = q, converted(cache, kept), metadata, AttentionParameters(width**-0.5, window, sinks, chunked=chunked)
    assert close(paged_attention(*inputs), paged_attention_reference(*inputs), 2e-5)


def test_a_query_of_chunked_attention_sees_only_its_own_chunk(paged: Paged) -> None:
    """The last query of a chunk sees as many positions as a window; the first of the next sees itself alone."""
    q, cache, metadata = paged([1], [75], 4, 2, 16, 4)
    for context, seen in ((74, 37), (75, 1)):
        length = torch.tensor([context], dtype=torch.int32, device=DEVICE)
        inputs = q, cache, dataclasses.replace(metadata, context_len_S=length)
        ours = paged_attention(*inputs, AttentionParameters(0.25, 37, chunked=True))
        assert close(ours, paged_attention_reference(*inputs, AttentionParameters(0.25, seen)))


def test_a_sink_takes_its_share_of_the_softmax_and_adds_nothing(paged: Paged) -> None:
    q, cache, metadata = paged([1], [1], 4, 2, 16, 4)
    block = metadata.block_table_SB[0, 0]
    value = cache.v_NGPd[block, :, 0].repeat_interleave(2, dim=0)
    score = (q[0] * cache.k_NGPd[block, :, 0].repeat_interleave(2, dim=0)).sum(-1)
    sinks = normal(4)
    ours = paged_attention(q, cache, metadata, AttentionParameters(1.0, sinks_H=sinks))
    assert close(ours[0], value * torch.sigmoid(score - sinks)[:, None])


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("kept", CACHES)
@pytest.mark.parametrize("way", ["fast", "rounded", "torch", "reference"])
def test_blocks_behind_a_window_may_have_any_content(paged: Paged, way: str, kept: torch.dtype, chunked: bool) -> None:
    queries, contexts, window = [1, 1, 7, 130, 40], [1, 300, 70, 250, 290], 37
    q, cache, metadata = paged(queries, contexts, 4, 2, 32, 8)
    table = metadata.block_table_SB
    parameters = AttentionParameters(0.2, window, chunked=chunked, rounds=way == "rounded")
    attention = {"reference": paged_attention_reference, "torch": paged_attention_batched}.get(way, paged_attention)

    def attend() -> Tensor:
        return attention(q, converted(cache, kept), metadata, parameters)

    before = attend()
    used = set(table.flatten().tolist())
    nobodys = next(block for block in range(len(cache.k_NGPd)) if block not in used)  # its content is NaN
    for s, (count, context) in enumerate(zip(queries, contexts, strict=True)):
        first = (context - count) // window * window if chunked else max(0, context - count + 1 - window)
        table[s, : first // 8] = nobodys
    assert nobodys in table
    assert torch.equal(attend(), before)


@pytest.mark.parametrize("num_decode", [0, 2])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (37, False), (37, True)])
@pytest.mark.parametrize("workspace", [1, 1 << 30])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_paged_attention_through_torchs_own(
    paged: Paged, num_decode: int, window: int | None, chunked: bool, workspace: int, with_sinks: bool
) -> None:
    q, cache, metadata = paged([1, 1, 7, 130, 40], [1, 300, 7, 150, 290], 8, 2, 64, 16)
    sinks = normal(8, scale=3) if with_sinks else None
    some = dataclasses.replace(metadata, num_decode=num_decode)
    inputs = q, cache, some, AttentionParameters(0.125, window, sinks, chunked=chunked)
    ours = paged_attention_batched(*inputs, workspace_bytes=workspace)
    assert close(ours, paged_attention_reference(*inputs), 2e-5)


@pytest.mark.combinations(by=("kept",))
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(1, 32, 16), (16, 48, 16), (128, 64, 32), (3, 20, 10)])
@pytest.mark.parametrize("places", [16, 5])
@pytest.mark.parametrize("kept", CACHES)
def test_mla_attention(paged: Paged, heads: int, latent: int, rotated: int, places: int, kept: torch.dtype) -> None:
    q, cache, metadata = paged([1, 1, 7, 130, 40], [1, 300, 7, 150, 290], heads, 1, latent + rotated, places)
    k_NGPL = cache.k_NGPd.to(kept)
    inputs = q, LatentCache(k_NGPL[:, 0], latent), metadata, 0.2
    expected = mla_attention_reference(*inputs)
    assert expected.shape == (179, heads, latent)
    assert close(mla_attention(*inputs), expected, 2e-5)
    rows, some = LayerCache(k_NGPL, k_NGPL[..., :latent]), dataclasses.replace(metadata, num_decode=2)
    assert close(paged_attention_batched(q, rows, some, AttentionParameters(0.2)), expected, 2e-5)


def test_experts_through_torchs_grouped_product() -> None:
    x = normal(50, 64).bfloat16()
    gate_up, down = normal(6, 96, 64, scale=0.125).bfloat16(), normal(6, 64, 48, scale=0.125).bfloat16()
    weight, expert = route_reference(normal(50, 6), RoutingSpec(6, 2, renormalize=True))
    assert experts_grouped.fits(x, down)
    ours = experts_grouped.experts(x, weight, expert, gate_up, down)
    assert close(ours.float(), experts_reference(x, weight, expert, gate_up, down).float(), 0.02)


def test_paged_attention_survives_large_scores(paged: Paged) -> None:
    q, *rest = paged([3], [200], 4, 2, 32, 16)
    inputs = q * 300, *rest, AttentionParameters(1.0)
    assert close(paged_attention(*inputs), paged_attention_reference(*inputs), 1e-3)


@pytest.mark.parametrize("kept", CACHES)
def test_values_may_have_a_width_and_a_norm_of_their_own_in_blocks_that_lie_apart(kept: torch.dtype) -> None:
    """Blocks of layers with different shapes share memory, so that a layer's blocks are not adjacent."""
    tokens, heads, kv_heads, places, widths = 37, 6, 2, 8, (48, 32)
    qkv = normal(tokens, heads * widths[0] + kv_heads * sum(widths))
    angles, positions = normal(500, 12), torch.randint(0, 500, (tokens,), device=DEVICE)
    slots = torch.randperm(10 * places, device=DEVICE)[:tokens]
    rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
    plan = AttentionInputPlan(normal(48), normal(48), 1e-6, v_norm=normal(32))
    near = [torch.full((10, kv_heads, places, width), 7.0, device=DEVICE, dtype=kept) for width in widths]
    far, begin = torch.full((10, 2000), 7.0, device=DEVICE, dtype=kept), 64
    apart = []
    for width in widths:
        size = kv_heads * places * width
        apart.append(far[:, begin : begin + size].view(10, kv_heads, places, width))
        begin += size
    expected = attention_input_reference(qkv.clone(), plan, rotary, LayerCache(*near), slots)
    ours = attention_input(qkv, plan, rotary, LayerCache(*apart), slots)
    assert close(ours, expected)
    rounding = 0.0 if kept is torch.float32 else 2**-8
    for found, wanted in zip(apart, near, strict=True):
        assert close(found.float(), wanted.float(), 1e-5 + rounding)
    assert int((far != 7.0).sum()) <= tokens * kv_heads * sum(widths)
    rows = [0, tokens], [77], [list(range(10))]
    starts, contexts, table = (torch.tensor(row, dtype=torch.int32, device=DEVICE) for row in rows)
    inputs = expected, LayerCache(*apart), AttentionMetadata(starts, contexts, table, max_query=tokens, max_context=77)
    for rounds in (False, True):
        attended = paged_attention(*inputs, AttentionParameters(0.2, rounds=rounds))
        assert close(attended, paged_attention_reference(*inputs, AttentionParameters(0.2)), 2e-2 if rounds else 2e-5)


@pytest.mark.parametrize(
    ("norm", "clip"),
    [(norm, clip) for norm in ("none", "head", "full") for clip in (None, 0.7)] + [("head of rotated", None)],
)
@pytest.mark.parametrize(("width", "pairs"), [(32, 16), (64, 20), (20, 10)])
@pytest.mark.parametrize("kept", CACHES)
def test_attention_input(norm: str, clip: float | None, width: int, pairs: int, kept: torch.dtype) -> None:
    tokens, heads, kv_heads, places = 37, 6, 2, 8
    qkv = normal(tokens, (heads + 2 * kv_heads) * width)
    angles = normal(500, pairs)
    positions = torch.randint(0, 500, (tokens,), device=DEVICE)
    slots = torch.randperm(10 * places, device=DEVICE)[:tokens]
    slots[5::9] = -1  # padding tokens
    norms = {"none": (None, None)} | dict.fromkeys(("head", "head of rotated"), (normal(width), normal(width)))
    q_norm, k_norm = norms.get(norm, (normal(heads * width), normal(kv_heads * width)))
    plan = AttentionInputPlan(q_norm, k_norm, 1e-6, clip, rotates_first=norm == "head of rotated")
    caches = [torch.full((10, kv_heads, places, width), 7.0, device=DEVICE, dtype=kept) for _ in range(4)]
    rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
    expected = attention_input_reference(qkv.clone(), plan, rotary, LayerCache(*caches[:2]), slots)
    ours = attention_input(qkv, plan, rotary, LayerCache(*caches[2:]), slots)
    assert close(ours, expected)
    rounding = 0.0 if kept is torch.float32 else 2**-8  # where float32's last bit decides how it is rounded
    assert close(caches[2].float(), caches[0].float(), 1e-5 + rounding)
    assert torch.equal(caches[3], caches[1])
    assert int((caches[3] != 7.0).any(dim=3).any(dim=1).sum()) == int((slots >= 0).sum())


@pytest.mark.parametrize("with_query_norm", [False, True])
@pytest.mark.parametrize(("latent", "pairs", "query"), [(64, 16, 48), (512, 8, 96), (20, 5, 12)])
@pytest.mark.parametrize("kept", CACHES)
def test_latent_input(latent: int, pairs: int, query: int, with_query_norm: bool, kept: torch.dtype) -> None:
    tokens, places = 37, 8
    x, angles = normal(tokens, query + latent + 2 * pairs), normal(500, pairs)
    positions = torch.randint(0, 500, (tokens,), device=DEVICE)
    slots = torch.randperm(10 * places, device=DEVICE)[:tokens]
    slots[30:] = -1
    plan = LatentInputPlan(normal(latent), normal(query) if with_query_norm else None, 1e-6)
    cache = torch.full((10, places, latent + 2 * pairs), 7.0, device=DEVICE, dtype=kept)
    rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
    expected = latent_reference.latent_input(x.clone(), plan, rotary, LatentCache(cache, latent), slots)
    rows, rounding = cache.flatten(0, 1).float(), 0.0 if kept is torch.float32 else 2**-8
    normed = rms_norm_reference(x[:30, query : query + latent], plan.latent_norm, 1e-6)
    assert close(rows[slots[:30], :latent], normed, 1e-5 + rounding)
    assert (rows == 7.0).all(dim=1).sum() == 80 - 30
    ours = torch.full_like(cache, 7.0)
    assert close(latent_input(x.clone(), plan, rotary, LatentCache(ours, latent), slots), expected)
    assert close(ours.float(), cache.float(), 1e-5 + rounding)
    latent_input(x, plan, rotary, LatentCache(ours, latent), torch.full_like(slots, -1))
    assert close(ours.float(), cache.float(), 1e-5 + rounding)


@pytest.mark.parametrize("dtype", WEIGHTS)
@pytest.mark.parametrize(
    ("rows", "heads", "latent", "plain", "pairs"), [(1, 16, 512, 128, 32), (70, 3, 40, 16, 5), (9, 2, 48, 32, 8)]
)
@pytest.mark.usefixtures("arithmetic")
def test_latent_queries(rows: int, heads: int, latent: int, plain: int, pairs: int, dtype: torch.dtype) -> None:
    q = normal(rows, heads * (plain + 2 * pairs) + 16).bfloat16().float()[:, :-16]  # the rest of a row is the cache's
    q_THd = q.as_strided((rows, heads, plain + 2 * pairs), (q.stride(0), plain + 2 * pairs, 1))
    key_up, angles = normal(heads, latent, plain, scale=plain**-0.5).to(dtype), normal(50, pairs)
    inputs = key_up, RotaryInputs(angles.cos(), angles.sin(), torch.randint(0, 50, (rows,), device=DEVICE))
    assert close(latent_queries(q_THd, *inputs), latent_reference.latent_queries(q_THd, *inputs))


def test_a_wrong_shape_is_named(paged: Paged) -> None:
    with pytest.raises(KernelInputError, match=r"weight has shape \(4, 32\)"):
        linear(normal(2, 16), normal(4, 32))
    with pytest.raises(KernelInputError, match="logits has shape"):
        route(normal(2, 16), RoutingSpec(8, 2, renormalize=True))
    q, cache, metadata = paged([1], [4], 4, 2, 16, 4)
    with pytest.raises(KernelInputError, match="query heads must be a multiple"):
        paged_attention(q[:, :3], cache, metadata, AttentionParameters(1.0))
    with pytest.raises(KernelInputError, match=r"sinks has shape \(3,\)"):
        paged_attention(q, cache, metadata, AttentionParameters(1.0, sinks_H=normal(3)))
    with pytest.raises(KernelInputError, match="latent_width"):
        mla_attention(q, LatentCache(cache.k_NGPd[:, 0], 17), metadata, 1.0)
    with pytest.raises(KernelInputError, match="scale must be positive"):
        AttentionParameters(0.0)
    with pytest.raises(KernelInputError, match=r"query_start has shape \(2,\)"):
        dataclasses.replace(metadata, context_len_S=metadata.context_len_S.repeat(2))


@pytest.mark.parametrize(("heads", "width", "dtype"), [(16, 64, torch.float32), (5, 32, torch.bfloat16), (3, 20, None)])
def test_an_indexer_selects_the_tokens_with_the_largest_scores(
    paged: Paged, heads: int, width: int, dtype: torch.dtype | None
) -> None:
    q, cache, metadata = paged([1, 1, 12, 40], [1, 300, 12, 170], heads, 1, width, 7)
    keys = cache.k_NGPd.to(dtype) if DEVICE == "cpu" else cache.k_NGPd
    inputs = q, normal(54, heads), keys.squeeze(1), metadata
    for top_k, most in ((30, 30), (1000, 300)):
        slots, counts = select_tokens(*inputs, top_k)
        expected, expected_counts = select_tokens_reference(*inputs, most)
        assert slots.shape == (54, most)
        assert torch.equal(counts, expected_counts)
        is_void = torch.arange(most, device=DEVICE) >= counts[:, None]
        assert torch.equal(slots.masked_fill(is_void, 0), expected)


def test_index_keys_are_normalised_rotated_and_stored_in_their_slots() -> None:
    key, weight, bias, angles = normal(9, 24), normal(24), normal(24), normal(50, 4)
    positions, slots = torch.arange(20, 29, device=DEVICE), torch.randperm(40, device=DEVICE)[:9]
    slots[7:] = -1
    keys = torch.full((10, 4, 24), 7.0, device=DEVICE)
    rotary = RotaryInputs(angles.cos(), angles.sin(), positions)
    store_index_keys(key, IndexKeyNorm(weight, bias, 1e-6), rotary, keys, slots)
    normed = torch.nn.functional.layer_norm(key, (24,), weight, bias, 1e-6)
    expected = rope(normed.unsqueeze(1), *rotary).squeeze(1)
    assert close(keys.flatten(0, 1)[slots[:7]], expected[:7])
    assert (keys == 7).all(dim=2).sum() == 40 - 7
    with pytest.raises(KernelInputError, match="the rotated width is larger than an index key"):
        store_index_keys(key[:, :6], IndexKeyNorm(weight[:6], bias[:6], 1e-6), rotary, keys[..., :6], slots)
