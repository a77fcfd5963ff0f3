"""Attention over shards of a paged cache: the combined results of all shards are those of one cache."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from moiety_kernels.checks import KernelInputError
from moiety_kernels.cpu import paths
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input.reference import store_rows
from moiety_kernels.mla_attention.reference import mla_attention
from moiety_kernels.paged_attention import paged_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters
from moiety_kernels.paged_attention.reference import paged_attention as attention_reference
from moiety_kernels.shard_attention import (
    ShardResult,
    batched,
    combine_shards,
    reference,
    shard_attention,
    shard_mla_attention,
)

from .conftest import DEVICE, Paged

QUERIES, CONTEXTS = [1, 1, 7, 130, 40], [1, 300, 7, 150, 290]
WAYS = {"kernel": shard_attention, "reference": reference.shard_attention, "torch": batched.shard_attention}


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def shards_of(
    cache: LayerCache, metadata: AttentionMetadata, num_shards: int
) -> Iterator[tuple[LayerCache, AttentionMetadata]]:
    """The cache of each shard: every num_shards-th place of a block, whose number of places this divides."""
    for shard in range(num_shards):
        parts = (part[:, :, shard::num_shards].contiguous() for part in (cache.k_NGPd, cache.v_NGPd))
        yield LayerCache(*parts), dataclasses.replace(metadata, num_shards=num_shards, shard=shard)


def combined(results: list[ShardResult], sinks_H: Tensor | None = None) -> Tensor:
    out, lse = zip(*results, strict=True)
    return combine_shards(torch.stack(out), torch.stack(lse), sinks_H)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_shards", [1, 2, 4])
@pytest.mark.parametrize(("window", "chunked"), [(None, False), (1, False), (37, False), (37, True)])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(8, 2, 64), (5, 1, 48), (4, 1, 256), (4, 2, 10)])
@pytest.mark.parametrize("with_sinks", [False, True])
def test_the_shards_of_a_cache_together_give_its_attention(
    paged: Paged,
    way: str,
    num_shards: int,
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None,
    chunked: bool,
    with_sinks: bool,
) -> None:
    q, cache, metadata = paged(QUERIES, CONTEXTS, heads, kv_heads, width, 8)
    metadata = dataclasses.replace(metadata, num_decode=2)
    sinks = 3 * torch.randn(heads, device=DEVICE) if with_sinks else None
    parameters = AttentionParameters(width**-0.5, window, chunked=chunked)
    results = [
        ShardResult(*WAYS[way](q, part, some, parameters)) for part, some in shards_of(cache, metadata, num_shards)
    ]
    expected = attention_reference(q, cache, metadata, dataclasses.replace(parameters, sinks_H=sinks))
    torch.testing.assert_close(combined(results, sinks), expected, rtol=0, atol=2e-5)


def test_a_query_that_sees_no_key_of_a_shard_adds_nothing(paged: Paged) -> None:
    q, cache, metadata = paged([1, 2], [1, 2], 4, 2, 16, 4)
    for part, some in list(shards_of(cache, metadata, 4))[2:]:
        for way in WAYS.values():
            out, lse = way(q, part, some, AttentionParameters(0.25))
            assert not out.any() and (lse == float("-inf")).all()


def test_pieces_of_keys_and_queries_are_added_up(paged: Paged) -> None:
    q, cache, metadata = paged(QUERIES, CONTEXTS, 8, 2, 64, 8)
    for part, some in shards_of(cache, metadata, 2):
        ours = batched.shard_attention(q, part, some, AttentionParameters(0.125), keys_at_once=8, queries_at_once=16)
        for one, expected in zip(
            ours, reference.shard_attention(q, part, some, AttentionParameters(0.125)), strict=True
        ):
            torch.testing.assert_close(one, expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("num_shards", [1, 2, 4])
def test_pairs_of_bfloat16_lose_nothing_but_by_rounding(
    paged: Paged, num_shards: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not paths.is_usable(paths.PAIRS):
        pytest.skip("this processor does not multiply in pairs: test_emulated.py runs this with that emulated")
    monkeypatch.setattr(paths, "is_usable", lambda path: path is not paths.TILES)
    q, cache, metadata = paged(QUERIES, CONTEXTS, 8, 2, 64, 8)
    parameters = AttentionParameters(0.125, rounds=True)
    parts = [shard_attention(q, part, some, parameters) for part, some in shards_of(cache, metadata, num_shards)]
    exact = attention_reference(q, cache, metadata, AttentionParameters(0.125))
    ours = combined(parts)
    assert not torch.equal(ours, exact)
    torch.testing.assert_close(ours, exact, rtol=0, atol=0.05)


@pytest.mark.parametrize("kept", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("num_shards", [2, 4])
def test_shards_of_latent_rows_give_the_attention_of_all(paged: Paged, num_shards: int, kept: torch.dtype) -> None:
    heads, latent, rotated = 16, 48, 16
    q, cache, metadata = paged(QUERIES, CONTEXTS, heads, 1, latent + rotated, 8)
    rows, scales = cache.k_NGPd[:, 0], None
    if kept is torch.int8:
        scales = (rows.abs().amax(-1) / 127).nan_to_num(1.0)
        rows = (rows / scales[..., None]).round()
    rows = rows.nan_to_num(0.0).to(kept)
    expected = mla_attention(q, LatentCache(rows, latent, scales, scales), metadata, 0.2)
    results = []
    for shard in range(num_shards):
        own = slice(shard, None, num_shards)
        of_shard = None if scales is None else scales[:, own].contiguous()
        part = LatentCache(rows[:, own].contiguous(), latent, of_shard, of_shard)
        some = dataclasses.replace(metadata, num_shards=num_shards, shard=shard)
        results.append(shard_mla_attention(q, part, some, 0.2))
    torch.testing.assert_close(combined(results), expected, rtol=0, atol=2e-5)


def test_a_row_has_the_same_bits_in_any_batch(paged: Paged) -> None:
    q, cache, metadata = paged(QUERIES, CONTEXTS, 8, 2, 64, 8)
    alone = AttentionMetadata(
        torch.tensor([0, 40], dtype=torch.int32), metadata.context_len_S[4:], metadata.block_table_SB[4:], 40, 290
    )
    for shard in range(2):
        part = LayerCache(*(one[:, :, shard::2].contiguous() for one in (cache.k_NGPd, cache.v_NGPd)))
        whole, single = (
            shard_attention(
                rows, part, dataclasses.replace(some, num_shards=2, shard=shard), AttentionParameters(0.125)
            )
            for rows, some in ((q, metadata), (q[139:], alone))
        )
        assert torch.equal(whole.out_THd[139:], single.out_THd) and torch.equal(whole.lse_TH[139:], single.lse_TH)


def test_wrong_shards_are_refused(paged: Paged) -> None:
    q, cache, metadata = paged([1], [5], 4, 2, 16, 4)
    with pytest.raises(KernelInputError, match="one of the shards"):
        dataclasses.replace(metadata, num_shards=2, shard=2)
    some = dataclasses.replace(metadata, num_shards=2, shard=1)
    with pytest.raises(KernelInputError, match="needs shard_attention"):
        paged_attention(q, cache, some, AttentionParameters(0.25))
    with pytest.raises(KernelInputError, match="sinks are added"):
        shard_attention(q, cache, some, AttentionParameters(0.25, sinks_H=torch.zeros(4)))


def test_rows_without_a_slot_are_not_stored_wherever_they_are() -> None:
    rows, before = torch.randn(5, 3), torch.randn(8, 3)
    for slots in ([-1, 0, -1, 3, 5], [4, -1, 0, 1, -1], [-1] * 5):
        ours, expected = before.clone(), before.clone()
        store_rows(rows, ours, torch.tensor(slots))
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                expected[slot] = row
        assert torch.equal(ours, expected)
