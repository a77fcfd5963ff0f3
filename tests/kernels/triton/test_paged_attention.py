"""The Triton kernels of paged attention agree with their definition."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.kernels.mutants import FailingMutant
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.kv_store.reference import kv_store
from moiety_kernels.paged_attention import kernel, paged_attention, reference
from moiety_kernels.paged_attention.batched import paged_attention as paged_attention_batched
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.paged_attention.kernels import decode, prefill, softmax

RAGGED = ((1, 1), (1, 17), (1, 300), (3, 3), (70, 90), (1, 16), (0, 5), (40, 290))  # (queries, context) of a sequence


@dataclass(frozen=True)
class Case:
    """One call. The first `decoded` sequences have one query each."""

    sequences: tuple[tuple[int, int], ...] = RAGGED
    decoded: int = 3
    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    value_width: int = 0  # 0: as wide as keys
    places: int = 16
    window: int | None = None
    chunked: bool = False
    sinks: bool = False
    dtype: torch.dtype = torch.float32
    cache_dtype: torch.dtype | None = None
    scaled: bool = False

    @property
    def longest(self) -> int:
        return max(context for _, context in self.sequences)


def arguments(case: Case, device: str) -> tuple[Tensor, LayerCache, AttentionMetadata, AttentionParameters]:
    """Random ones. Beyond a context the cache has NaN (or 127), and the table a block with nothing else, also
    behind the window of a sequence's first query, where blocks are freed."""
    counts = [-(-context // case.places) for _, context in case.sequences]
    blocks = torch.randperm(sum(counts) + 3, dtype=torch.int32)
    table = torch.full((len(counts), max(counts) + 2), int(blocks[-1]), dtype=torch.int32)
    widths = case.width, case.value_width or case.width
    caches = [torch.full((len(blocks), case.kv_heads, case.places, width), float("nan")) for width in widths]
    scales = [torch.full(cache.shape[:3], float("nan")) if case.scaled else None for cache in caches]
    if case.cache_dtype is torch.int8:
        caches = [torch.full_like(cache, 127) for cache in caches]
    used = 0
    for s, ((queries, context), count) in enumerate(zip(case.sequences, counts, strict=True)):
        table[s, :count] = blocks[used : used + count]
        used += count
        at = torch.arange(context)
        slots = table[s, at // case.places].long() * case.places + at % case.places
        rows = [torch.randn(context, case.kv_heads, width) for width in widths]
        for row, scale in zip(rows, scales, strict=True):
            if scale is not None:
                of_slot = torch.rand(context, case.kv_heads) * 0.02 + 0.02
                scale[slots // case.places, :, slots % case.places] = of_slot
                row.div_(of_slot[..., None]).clamp_(-127, 127)
        kv_store(rows[0], rows[1], LayerCache(caches[0], caches[1]), slots)
        if case.window is not None:
            first = max(0, context - queries + 1 - case.window)
            if case.chunked:
                first = max(0, context - queries) // case.window * case.window
            table[s, : first // case.places] = blocks[-1]
    starts = torch.tensor([0, *torch.tensor([n for n, _ in case.sequences]).cumsum(0).tolist()], dtype=torch.int32)
    contexts = torch.tensor([context for _, context in case.sequences], dtype=torch.int32)
    # Heads lie apart in the queries, so that what overruns one shows.
    q = torch.randn(int(starts[-1]), case.heads + 1, case.width).to(device, case.dtype)[:, : case.heads]
    sinks = torch.randn(case.heads, device=device) * 3 if case.sinks else None
    stored = [cache.to(device, case.cache_dtype or case.dtype) for cache in caches]
    sequences = [tensor.to(device) for tensor in (starts, contexts, table)]
    given = [None if scale is None else scale.to(device) for scale in scales]
    most = max(queries for queries, _ in case.sequences)
    metadata = AttentionMetadata(*sequences, most, case.longest, case.decoded)
    parameters = AttentionParameters(case.width**-0.5, case.window, sinks, case.chunked)
    return q, LayerCache(*stored, *given), metadata, parameters


def assert_agrees(case: Case, device: str) -> None:
    args = arguments(case, device)
    ours = kernel.paged_attention(*args)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if case.dtype is torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(ours, reference.paged_attention(*args), **tolerance)


CASES = {
    "nothing special": Case(),
    "nothing decoded": Case(decoded=0, dtype=torch.float16),
    "window and sinks": Case(window=140, sinks=True),
    "chunks, odd blocks": Case(window=140, chunked=True, places=5),
    "window of one": Case(window=1, dtype=torch.float16),
    "sinks, odd blocks": Case(sinks=True, places=5, dtype=torch.float16),
    "blocks of one": Case(places=1, heads=3, kv_heads=1),
    "large blocks, odd groups": Case(places=256, heads=7, kv_heads=1, dtype=torch.float16),
    "more heads a group than a tile has rows": Case(((1, 130), (3, 40)), decoded=1, heads=70, kv_heads=1),
    "fp8": Case(cache_dtype=torch.float8_e4m3fn, dtype=torch.float16),
    "fp8, scales": Case(((1, 200), (9, 40)), 1, cache_dtype=torch.float8_e4m3fn, scaled=True, window=30, sinks=True),
    "int8": Case(cache_dtype=torch.int8, scaled=True),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_ragged_batch_agrees(case: Case, device: str) -> None:
    assert_agrees(case, device)


@pytest.mark.parametrize("widths", [(20, 12), (64, 64), (80, 80), (112, 112), (192, 128), (256, 256)])
def test_any_width_of_a_head_agrees(widths: tuple[int, int], device: str) -> None:
    width, value_width = widths
    assert_agrees(
        Case(((1, 1), (1, 140), (9, 70)), 2, width=width, value_width=value_width, dtype=torch.float16), device
    )


@pytest.mark.parametrize("width", [192, 256])
@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.int8])
def test_wide_heads_in_eight_bits_agree(width: int, kept: torch.dtype, device: str) -> None:
    sequences, scaled = ((1, 1), (1, 140), (9, 70)), kept is torch.int8
    case = Case(sequences, 2, width=width, dtype=torch.float16, cache_dtype=kept, scaled=scaled, window=50)
    assert_agrees(case, device)


def test_a_sequence_of_nothing_gets_zeros(device: str) -> None:
    args = arguments(Case(((1, 3), (1, 0), (2, 2)), 2), device)
    assert torch.equal(kernel.paged_attention(*args)[1], torch.zeros(4, 16, device=device))


def test_large_scores_do_not_overflow(device: str) -> None:
    q, *rest = arguments(Case(((1, 200), (9, 40)), 1), device)
    ours = kernel.paged_attention(q * 300, *rest)
    torch.testing.assert_close(ours, reference.paged_attention(q * 300, *rest), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("which", [0, 3])
def test_a_request_has_the_same_bits_alone_and_in_a_batch(which: int, device: str) -> None:
    case = Case(((1, 300), (1, 17), (1, 5000), (70, 290), (90, 95)), 3, kv_heads=1, dtype=torch.float16, window=280)
    q, cache, metadata, parameters = arguments(case, device)
    starts, contexts, table = metadata.query_start_S1, metadata.context_len_S, metadata.block_table_SB
    begin, end = starts[which : which + 2].tolist()
    sequence = starts[which : which + 2] - begin, contexts[which, None], table[which, None]
    alone = AttentionMetadata(*sequence, end - begin, int(contexts[which]), int(which < case.decoded))
    ours = kernel.paged_attention(q[begin:end], cache, alone, parameters)
    assert torch.equal(ours, kernel.paged_attention(q, cache, metadata, parameters)[begin:end])


def test_a_row_has_the_same_bits_however_its_prompt_was_cut(device: str) -> None:
    case = Case(((70, 290),), 0, dtype=torch.float16, window=200, sinks=True)
    q, cache, metadata, parameters = arguments(case, device)
    whole = kernel.paged_attention(q, cache, metadata, parameters)
    for begin, end in ((0, 33), (33, 70)):
        starts = torch.tensor([0, end - begin], dtype=torch.int32, device=device)
        chunk = dataclasses.replace(metadata, query_start_S1=starts, context_len_S=metadata.context_len_S - 70 + end)
        part = kernel.paged_attention(q[begin:end], cache, chunk, parameters)
        assert torch.equal(part, whole[begin:end])


def test_caches_whose_blocks_lie_far_apart(untouched: Any, device: str) -> None:
    """The offsets are beyond 32 bits."""
    case = Case(((1, 5), (2, 4)), 1, kv_heads=1, dtype=torch.float16, cache_dtype=torch.float8_e4m3fn)
    q, cache, metadata, parameters = arguments(case, device)
    last = int(metadata.block_table_SB[:, 0].max())
    stride, far = (1 << 31) // last + 16, []
    for part in (cache.k_NGPd, cache.v_NGPd):
        held = untouched(stride * (last + 1), torch.float8_e4m3fn)
        near = part[: last + 1]
        far.append(held.as_strided(near.shape, (stride, *near.stride()[1:])).copy_(near))
    args = q, LayerCache(*far), metadata, parameters
    torch.testing.assert_close(kernel.paged_attention(*args), reference.paged_attention(*args), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
def test_a_cache_of_eight_bits_is_understood_without_the_kernels_too(dtype: torch.dtype, device: str) -> None:
    args = arguments(Case(cache_dtype=dtype, scaled=True, window=37, sinks=True), device)
    expected = reference.paged_attention(*args)
    for attention in (paged_attention_batched, paged_attention):
        torch.testing.assert_close(attention(*args), expected, rtol=1e-4, atol=1e-4)


def test_whole_numbers_without_scales_are_refused(device: str) -> None:
    q, cache, *rest = arguments(Case(cache_dtype=torch.int8, scaled=True), device)
    with pytest.raises(KernelInputError, match="needs the scales"):
        paged_attention(q, LayerCache(cache.k_NGPd, cache.v_NGPd), *rest)


SMALL = Case(((1, 300), (1, 5), (60, 300), (8, 70)), 2, places=4)
MUTANTS = [
    (softmax, "m_key = i_key < end", "m_key = i_key <= end", SMALL),
    (softmax, "(i_key % PLACES) * k_place", "(start % PLACES) * k_place", SMALL),
    (softmax, "i_at[None, :] <= i_position[:, None]", "i_at[None, :] < i_position[:, None] + 2", SMALL),
    (softmax, "position + 1 - window", "position - window", dataclasses.replace(SMALL, window=9)),
    (softmax, "position // window * window", "position // window", dataclasses.replace(SMALL, window=9, chunked=True)),
    (softmax, "b_total = b_total * b_shrink", "b_total = b_total", SMALL),
    (prefill, "GROUP // BM - low", "GROUP // BM", SMALL),
    (prefill, "end_all = tl.maximum(keys_before(first + 1,", "end_all = tl.maximum(keys_before(last + BN,", SMALL),
    (prefill, "i_head * GROUP + i_row % GROUP", "i_head * GROUP", SMALL),
    (decode, "begin = lowest + split * length", "begin = lowest + split * (length - 1)", SMALL),
    (decode, "b_sink = tl.load", "split = 0\n            b_sink = tl.load", dataclasses.replace(SMALL, sinks=True)),
    (softmax, "i_block * scale_block + i_key % PLACES", "i_block * scale_block", CASES["int8"]),
    (softmax, "b_weight *= tl.load(p_v_scale", "b_weight *= tl.load(p_k_scale", CASES["int8"]),
    (prefill, "p_v_scale += i_head * PLACES", "p_v_scale += i_head", CASES["int8"]),
    (decode, "p_k_head += i_head * PLACES", "p_k_head += 0", CASES["int8"]),
    (decode, "b_share = tl.exp2(b_weight - b_new)", "b_share = tl.exp2(b_new - b_new)", SMALL),
]


@pytest.mark.parametrize(("module", "old", "new", "case"), MUTANTS, ids=[new for _, _, new, _ in MUTANTS])
def test_a_mutant_is_found(
    module: ModuleType, old: str, new: str, case: Case, failing_attention: FailingMutant, device: str
) -> None:
    with failing_attention(module, (old, new)):
        assert_agrees(case, device)
