"""The Triton kernels of attention to one shard of a cache agree with their definition."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
from tests.kernels.mutants import FailingMutant
from torch import Tensor

from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.mla_attention import as_layer_cache
from moiety_kernels.mla_attention import kernel as latent_kernel
from moiety_kernels.mla_attention.reference import unscaled
from moiety_kernels.paged_attention import kernel
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.paged_attention.kernels import decode, prefill, softmax
from moiety_kernels.paged_attention.reference import paged_attention as whole_reference
from moiety_kernels.shard_attention import ShardResult, combine_shards, reference

from .test_mla_attention import arguments as latent_arguments
from .test_paged_attention import CASES, SMALL, Case, arguments


def shards_of(
    cache: LayerCache, metadata: AttentionMetadata, num_shards: int
) -> Iterator[tuple[LayerCache, AttentionMetadata]]:
    """The cache of each shard: every num_shards-th place of a block."""
    for shard in range(num_shards):
        parts = (
            None if part is None else part[:, :, shard::num_shards].contiguous()
            for part in (cache.k_NGPd, cache.v_NGPd, cache.k_scale_NGP, cache.v_scale_NGP)
        )
        yield LayerCache(*parts), dataclasses.replace(metadata, num_shards=num_shards, shard=shard)


def attend(q: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters) -> ShardResult:
    lse = torch.full(q.shape[:2], float("nan"), device=q.device)
    return ShardResult(kernel.paged_attention(q, cache, metadata, parameters, lse_TH=lse), lse)


def assert_agrees(case: Case, num_shards: int, device: str) -> None:
    q, cache, metadata, parameters = arguments(case, device)
    tolerance = 4e-3 if case.dtype is torch.float16 else 3e-5
    without_sinks = dataclasses.replace(parameters, sinks_H=None)
    results = []
    for part, some in shards_of(cache, metadata, num_shards):
        ours = attend(q, part, some, without_sinks)
        for one, expected in zip(ours, reference.shard_attention(q, part, some, without_sinks), strict=True):
            assert one.dtype is torch.float32
            torch.testing.assert_close(one, expected, rtol=tolerance, atol=tolerance)
        results.append(ours)
    out, lse = zip(*results, strict=True)
    together = combine_shards(torch.stack(out), torch.stack(lse), parameters.sinks_H)
    expected = whole_reference(q, cache, metadata, parameters).float()
    torch.testing.assert_close(together, expected, rtol=tolerance, atol=tolerance)


SHARDED = {
    "nothing special": (CASES["nothing special"], 2),
    "four shards": (CASES["nothing special"], 4),
    "one shard": (CASES["nothing special"], 1),
    "nothing decoded": (CASES["nothing decoded"], 2),
    "window and sinks": (CASES["window and sinks"], 4),
    "chunks": (dataclasses.replace(CASES["chunks, odd blocks"], places=6), 2),
    "window of one": (CASES["window of one"], 2),
    "large blocks, odd groups": (CASES["large blocks, odd groups"], 4),
    "int8": (CASES["int8"], 2),
    "fp8": (CASES["fp8"], 2),
}


@pytest.mark.parametrize(("case", "num_shards"), SHARDED.values(), ids=SHARDED.keys())
def test_each_shard_and_all_together_agree(case: Case, num_shards: int, device: str) -> None:
    assert_agrees(case, num_shards, device)


@pytest.mark.parametrize("kept", [None, torch.int8])
@pytest.mark.parametrize(("heads", "latent", "rotated"), [(3, 32, 16), (16, 512, 64)])
def test_shards_of_latent_rows_agree(
    heads: int, latent: int, rotated: int, kept: torch.dtype | None, device: str
) -> None:
    dtype = torch.float32 if latent < 512 else torch.float16
    q, cache, metadata, scale = latent_arguments(heads, latent, rotated, dtype, device, kept)
    for shard in range(2):
        parts = (
            None if part is None else part[:, shard::2].contiguous()
            for part in (cache.latent_scale_NP, cache.rotated_scale_NP)
        )
        own = LatentCache(cache.rows_NPL[:, shard::2].contiguous(), latent, *parts)
        some = dataclasses.replace(metadata, num_shards=2, shard=shard)
        lse = torch.full(q.shape[:2], float("nan"), device=device)
        ours = latent_kernel.mla_attention(q, own, some, scale, lse), lse
        paged = as_layer_cache(own)
        if kept is not None:
            rows = unscaled(own).unsqueeze(1)
            paged = LayerCache(rows, rows[..., :latent])
        expected = reference.shard_attention(q, paged, some, AttentionParameters(scale))
        tolerance = 4e-3 if dtype is torch.float16 else 3e-5
        for one, wanted in zip(ours, expected, strict=True):
            torch.testing.assert_close(one, wanted, rtol=tolerance, atol=tolerance)


MUTANTS = [
    (softmax, "i_at = i_key * SHARDS + shard", "i_at = i_key * SHARDS", SMALL),
    (softmax, "(position + (SHARDS - 1) - shard) // SHARDS", "(position + SHARDS - shard) // SHARDS", SMALL),
    (softmax, "/ LOG2_E\n        tl.store", "\n        tl.store", SMALL),
    (softmax, "tl.log2(tl.where(b_total > 0, b_total, 1.0))", "0.0", SMALL),
    (softmax, "b_max > NO_SCORE", "b_max > 2 * UNSEEN", SMALL),
    (prefill, "m_row & (b_total > 0)", "m_row", SMALL),
    (decode, "m_row, b_max, b_total)\n        else", "m_row, b_total, b_total)\n        else", SMALL),
]


@pytest.mark.parametrize(("module", "old", "new", "case"), MUTANTS, ids=[new for _, _, new, _ in MUTANTS])
def test_a_mutant_is_found(
    module: ModuleType, old: str, new: str, case: Case, failing_attention: FailingMutant, device: str
) -> None:
    with failing_attention(module, (old, new)):
        assert_agrees(dataclasses.replace(case, sequences=(*case.sequences, (2, 2))), 4, device)
