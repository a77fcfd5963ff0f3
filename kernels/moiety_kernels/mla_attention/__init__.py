"""Causal attention over a paged cache of latent rows: multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store.caches import LatentCache, LayerCache
from moiety_kernels.latent_input import require_latent_scales
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.mla_attention import reference
from moiety_kernels.paged_attention import EIGHT_BITS, batched
from moiety_kernels.paged_attention.inputs import AttentionParameters

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.paged_attention.inputs import AttentionMetadata


_cpu = lazy_import("moiety_kernels.paged_attention", "cpu")
_kernel = lazy_import(__name__, "kernel")


def reads_whole_numbers(width: int, value_width: int) -> bool:
    """Return whether the GPU here supports int8 rows of that width, `value_width` of which are the value."""
    taken: bool = _kernel().fits_widths(width, value_width)
    return taken


def mla_attention(q_THL: Tensor, cache: LatentCache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Return out_THV: attention of each sequence's queries, its last tokens in the cache, to positions up to their own.

    A position has one cache row, latent then rotated part, which is the key of every head; its latent part, of V =
    `cache.latent_width` entries, is the value. An int8 cache is multiplied by its scales. Everything else is as in
    `paged_attention` with one key-value head.
    """
    require_latent_agreement(q_THL, cache)
    require(metadata.num_shards == 1, "a cache in several shards needs shard_mla_attention")
    parameters, paged = AttentionParameters(scale), as_layer_cache(cache)
    if q_THL.is_cpu and _cpu().fits(q_THL, paged, metadata.block_table_SB):
        fast: Tensor = _cpu().paged_attention(q_THL, paged, metadata, parameters)
        return fast
    if q_THL.is_cuda and _kernel().fits(q_THL, cache):
        on_gpu: Tensor = _kernel().mla_attention(q_THL, cache, metadata, scale)
        return on_gpu
    if q_THL.is_cuda:
        require(
            cache.latent_scale_NP is None,
            f"no kernel on this GPU reads rows of {q_THL.shape[2]} int8, {cache.latent_width} of them the value: keep "
            "more bits",
        )
        return batched.paged_attention(q_THL, paged, metadata, parameters)
    return reference.mla_attention(q_THL, cache, metadata, scale)


def require_latent_agreement(q_THL: Tensor, cache: LatentCache) -> None:
    """Raise KernelInputError for queries and caches of types or shapes that do not go together."""
    rows_NPL = cache.rows_NPL
    require_shape("cache", rows_NPL, (-1, -1, q_THL.shape[2]))
    require(0 < cache.latent_width <= q_THL.shape[2], "latent_width must be between 1 and the width of a cache row")
    require(
        rows_NPL.dtype in (q_THL.dtype, *EIGHT_BITS) or (q_THL.is_cpu and rows_NPL.dtype is torch.bfloat16),
        "the cache must have the queries' dtype, float8_e4m3fn or int8, or bfloat16 on a CPU",
    )
    require_latent_scales(cache)


def as_layer_cache(cache: LatentCache) -> LayerCache:
    """Return the rows as keys and values of one key-value head, without their scales."""
    blocks, places, width = cache.rows_NPL.shape
    k_NGPL = cache.rows_NPL.view(blocks, 1, places, width)
    return LayerCache(k_NGPL, k_NGPL.as_strided((blocks, 1, places, cache.latent_width), k_NGPL.stride()))
