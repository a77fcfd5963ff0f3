"""Causal attention over one of several shards of a paged cache, and the exact combination of the shards' results.

Decode context parallelism: the positions of a sequence are divided among caches, whose owners attend to their own keys.
A partial result is combined with the others by the logarithm of its sum of exponentials (LSE), as between the parts of
FlashDecoding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.mla_attention import as_layer_cache, require_latent_agreement
from moiety_kernels.mla_attention.reference import unscaled
from moiety_kernels.paged_attention import require_agreement
from moiety_kernels.paged_attention.inputs import AttentionParameters
from moiety_kernels.shard_attention import batched, reference

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata

_cpu = lazy_import("moiety_kernels.paged_attention", "cpu")
_kernel = lazy_import("moiety_kernels.paged_attention", "kernel")
_latent_kernel = lazy_import("moiety_kernels.mla_attention", "kernel")


class ShardResult(NamedTuple):
    """Attention of T queries with H heads to the keys of one shard."""

    out_THd: Tensor  # float32, as wide as a value; 0 for a query that sees no key of the shard
    lse_TH: Tensor  # float32, log Σ exp of the scaled scores; -inf for a query that sees no key of the shard


def shard_attention(
    q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> ShardResult:
    """Return attention of each sequence's queries to the positions of this shard, up to their own.

    The cache has the positions that `metadata` says. Everything else is as in `paged_attention`, but sinks belong to
    `combine_shards`. Raises KernelInputError for sinks, and for types and shapes that do not go together.
    """
    require_agreement(q_THd, cache, None)
    require(parameters.sinks_H is None, "sinks are added when shards are combined, once for all of them")
    return _attend(q_THd, cache, metadata, parameters)


def shard_mla_attention(q_THL: Tensor, cache: LatentCache, metadata: AttentionMetadata, scale: float) -> ShardResult:
    """Return out_THV and lse_TH of `mla_attention` to the positions of this shard; see `shard_attention`."""
    require_latent_agreement(q_THL, cache)
    if q_THL.is_cuda and _latent_kernel().fits(q_THL, cache):
        lse_TH = q_THL.new_empty(q_THL.shape[:2], dtype=torch.float32)
        return ShardResult(_latent_kernel().mla_attention(q_THL, cache, metadata, scale, lse_TH), lse_TH)
    paged = as_layer_cache(cache)
    if cache.latent_scale_NP is not None:  # a key has two scales
        rows_NGPL = unscaled(cache).unsqueeze(1)
        paged = LayerCache(rows_NGPL, rows_NGPL[..., : cache.latent_width])
    return _attend(q_THL, paged, metadata, AttentionParameters(scale))


def combine_shards(out_RTHd: Tensor, lse_RTH: Tensor, sinks_H: Tensor | None = None) -> Tensor:
    """Return attention to the keys of all R shards from the results of each, added in the order of the shards.

    `sinks_H` are scores that take their share of the softmax and add nothing. At least one shard has a key that a query
    sees. Raises KernelInputError for shapes that do not go together.
    """
    require_shape("lse", lse_RTH, tuple(out_RTHd.shape[:3]))
    all_RTH = lse_RTH
    if sinks_H is not None:
        require_shape("sinks", sinks_H, (out_RTHd.shape[2],))
        all_RTH = torch.cat((lse_RTH, sinks_H.float().expand(1, *lse_RTH.shape[1:])))
    share_RTH = torch.exp(lse_RTH - torch.logsumexp(all_RTH, dim=0))
    out_THd = out_RTHd[0] * share_RTH[0].unsqueeze(-1)
    for part_THd, share_TH in zip(out_RTHd[1:], share_RTH[1:], strict=True):
        out_THd.addcmul_(part_THd, share_TH.unsqueeze(-1))
    return out_THd


def _attend(
    q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> ShardResult:
    if q_THd.is_cuda and _kernel().fits(q_THd, cache):
        lse_TH = q_THd.new_empty(q_THd.shape[:2], dtype=torch.float32)
        return ShardResult(_kernel().paged_attention(q_THd, cache, metadata, parameters, lse_TH=lse_TH), lse_TH)
    if q_THd.is_cuda:
        return ShardResult(*batched.shard_attention(q_THd, cache, metadata, parameters))
    if cache.k_scale_NGP is None and _cpu().fits(q_THd, cache, metadata.block_table_SB):
        states_TH2 = torch.empty(*q_THd.shape[:2], 2)
        out_THd = _cpu().paged_attention(q_THd, cache, metadata, parameters, states_TH2)
        largest_TH, total_TH = states_TH2.unbind(-1)
        return ShardResult(out_THd, largest_TH + total_TH.log())
    return ShardResult(*reference.shard_attention(q_THd, cache, metadata, parameters))
