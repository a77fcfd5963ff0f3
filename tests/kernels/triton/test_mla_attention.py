"""The Triton kernels of attention over latent rows agree with their definition."""

from __future__ import annotations

import dataclasses
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.kernels.mutants import Edit, FailingMutant, mutants, mutants_by
from tests.kernels.paged_rows import query_starts, scatter_rows
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.mla_attention import kernel, mla_attention, reference
from moiety_kernels.paged_attention.inputs import AttentionMetadata
from moiety_kernels.paged_attention.kernels import decode, prefill, softmax

QUERIES, CONTEXTS = [1, 1, 1, 40, 3], [1, 17, 600, 90, 3]
PLACES = 16


def arguments(
    heads: int, latent: int, rotated: int, dtype: torch.dtype, device: str, kept: torch.dtype | None = None
) -> tuple[Tensor, LatentCache, AttentionMetadata, float]:
    """Queries and a cache of the type `kept` that is NaN (or 127, with scales that are NaN) wherever no context is."""
    width = latent + rotated
    cache, table = scatter_rows(CONTEXTS, PLACES, width)
    starts = query_starts(QUERIES).to(device)
    q = torch.randn(sum(QUERIES), heads, width).to(device, dtype)
    contexts = torch.tensor(CONTEXTS, dtype=torch.int32, device=device)
    metadata = AttentionMetadata(starts, contexts, table.to(device), max(QUERIES), max(CONTEXTS), num_decode=3)
    if kept is not torch.int8:
        return q, LatentCache(cache.to(device, kept or dtype), latent), metadata, width**-0.5
    scales = [torch.where(cache[..., 0].isnan(), torch.nan, torch.rand(cache.shape[:2]) * 0.02 + 0.02) for _ in "lr"]
    of_entry = torch.repeat_interleave(torch.stack(scales, 2), torch.tensor([latent, rotated]), 2)
    whole = (cache / of_entry).clamp(-127, 127).nan_to_num(127).to(torch.int8)
    held = LatentCache(whole.to(device), latent, *(scale.to(device) for scale in scales))
    return q, held, metadata, width**-0.5


def assert_agrees(
    heads: int, latent: int, rotated: int, dtype: torch.dtype, device: str, kept: torch.dtype | None = None
) -> None:
    args = arguments(heads, latent, rotated, dtype, device, kept)
    ours = kernel.mla_attention(*args)
    tolerance = {"rtol": 4e-3, "atol": 4e-3} if dtype is torch.float16 else {"rtol": 2e-5, "atol": 2e-5}
    torch.testing.assert_close(ours, reference.mla_attention(*args), **tolerance)


@pytest.mark.parametrize(
    ("heads", "latent", "rotated", "dtype"),
    [(3, 32, 16, torch.float32), (16, 512, 64, torch.float16), (128, 64, 32, torch.float16)],
)
def test_chunks_and_decoding_agree(heads: int, latent: int, rotated: int, dtype: torch.dtype, device: str) -> None:
    assert_agrees(heads, latent, rotated, dtype, device)


@pytest.mark.parametrize("kept", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize(("dtype", "widths"), [(torch.float32, (32, 16)), (torch.float16, (512, 64))])
def test_rows_in_eight_bits_agree(dtype: torch.dtype, widths: tuple[int, int], kept: torch.dtype, device: str) -> None:
    assert_agrees(5, *widths, dtype, device, kept)


def test_rows_in_eight_bits_are_understood_without_the_kernels_too_and_others_refused(device: str) -> None:
    for kept in (torch.float8_e4m3fn, torch.int8):
        args = arguments(5, 32, 16, torch.float32, device, kept)
        torch.testing.assert_close(mla_attention(*args), reference.mla_attention(*args))
    with pytest.raises(KernelInputError, match="an int8 cache, and no other, has scales"):
        mla_attention(args[0], LatentCache(args[1].rows_NPL, 32), *args[2:])
    with pytest.raises(KernelInputError, match="the cache must have the queries' dtype"):
        mla_attention(*arguments(5, 32, 16, torch.float32, device, torch.float64))


def test_caches_whose_blocks_lie_far_apart(untouched: Any, device: str) -> None:
    """The offsets are beyond 32 bits."""
    q, cache, metadata, scale = arguments(3, 32, 16, torch.float16, device, torch.float8_e4m3fn)
    near, last = cache.rows_NPL, int(metadata.block_table_SB[:, 0].max())
    stride = (1 << 31) // last + 16
    held = untouched(stride * (last + 1), torch.float8_e4m3fn)
    far = held.as_strided((last + 1, *near.shape[1:]), (stride, *near.stride()[1:])).copy_(near[: last + 1])
    begin = torch.tensor(
        [0, 1, 1, 1, 1, 1], dtype=torch.int32, device=device
    )  # of the first alone, which has one block
    contexts = torch.tensor([1, 0, 0, 0, 0], dtype=torch.int32, device=device)
    args = AttentionMetadata(begin, contexts, torch.full_like(metadata.block_table_SB, last), 1, 16, 1), scale
    ours = kernel.mla_attention(q[:1], LatentCache(far, 32), *args)
    torch.testing.assert_close(ours, reference.mla_attention(q[:1], cache, *args), rtol=4e-3, atol=4e-3)


def test_only_values_that_are_the_first_part_of_a_row_fit(device: str) -> None:
    q, cache, *_ = arguments(4, 48, 32, torch.float16, device)
    assert not kernel.fits(q, cache)
    q, cache, *_ = arguments(4, 64, 32, torch.float16, device)
    assert kernel.fits(q, cache)


def test_a_request_has_the_same_bits_alone_and_in_a_batch(device: str) -> None:
    q, cache, metadata, scale = arguments(5, 32, 16, torch.float16, device)
    together = kernel.mla_attention(q, cache, dataclasses.replace(metadata, max_context=8192), scale)
    starts, contexts, table = metadata.query_start_S1, metadata.context_len_S, metadata.block_table_SB
    for s, decoded in ((2, 1), (3, 0)):
        begin, end = starts[s : s + 2].tolist()
        one = starts[s : s + 2] - begin, contexts[s, None], table[s, None]
        of_one = AttentionMetadata(*one, end - begin, CONTEXTS[s], decoded)
        alone = kernel.mla_attention(q[begin:end], cache, of_one, scale)
        assert torch.equal(alone, together[begin:end])


@mutants_by(
    "module",
    {
        softmax: {
            "b_score = tl.dot(b_q1, tl.trans(b_k1), acc=b_score": "b_score = tl.dot(b_q1, tl.trans(b_k1)",
            "b_sum0 * b_shrink[:, None]": "b_sum0",
        },
        prefill: {"begin = lowest // BN * BN": "begin = BN"},
        decode: {
            "b_max + tl.log2(b_total)": "b_max",
            "i_row = item % TILES * BM": "i_row = BM",
            "* num_splits + split) * num_heads + i_query_head\n        p_row": (
                "* num_splits) * num_heads + i_query_head\n        p_row"
            ),
        },
    },
)
def test_a_mutant_is_found(module: ModuleType, edit: Edit, failing_attention: FailingMutant, device: str) -> None:
    with failing_attention(module, edit):
        assert_agrees(3, 32, 16, torch.float32, device)


@mutants(
    {
        "b_score += b_rest * tl.load(p_k_scale": "b_score += b_rest * tl.load(p_v_scale",
        "b_score *= tl.load(p_v_scale": "b_score *= tl.load(p_k_scale",
        "b_weight *= tl.load(p_v_scale": "b_weight *= tl.load(p_k_scale",
        "b_rest = tl.dot(b_q1": "b_rest = 0.0 * tl.dot(b_q1",
    }
)
def test_a_mutant_that_scales_otherwise_is_found(edit: Edit, failing_attention: FailingMutant, device: str) -> None:
    with failing_attention(softmax, edit):
        assert_agrees(3, 32, 16, torch.float32, device, torch.int8)
