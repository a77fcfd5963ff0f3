"""Causal attention over a paged cache of latent rows: multi-head latent attention in its absorbed form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.latent_input import require_latent_scales
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.mla_attention import reference
from moiety_kernels.paged_attention import EIGHT_BITS, batched

if TYPE_CHECKING:
    from torch import Tensor


_cpu = lazy_import("moiety_kernels.paged_attention", "cpu")
_kernel = lazy_import(__name__, "kernel")


def reads_whole_numbers(width: int, value_width: int) -> bool:
    """Return whether the GPU here supports int8 rows of that width, `value_width` of which are the value."""
    taken: bool = _kernel().fits_widths(width, value_width)
    return taken


def mla_attention(
    q_THL: Tensor,
    cache_NPL: Tensor,
    value_width: int,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    latent_scale_NP: Tensor | None = None,
    rotated_scale_NP: Tensor | None = None,
    *,
    num_decode: int = 0,
    max_query: int,
    max_context: int,
) -> Tensor:
    """Return out_THV: attention of each sequence's queries, its last tokens in the cache, to positions up to their own.

    A position has one cache row, latent then rotated part, which is the key of every head; its first V = `value_width`
    entries are the value. An int8 cache is multiplied by float32 scales: one for a row's value, one for the rest.
    Everything else is as in `paged_attention` with one key-value head.
    """
    require_shape("cache", cache_NPL, (-1, -1, q_THL.shape[2]))
    require(0 < value_width <= q_THL.shape[2], "value_width must be between 1 and the width of a cache row")
    require_shape("query_start", query_start_S1, (context_len_S.shape[0] + 1,))
    require(scale > 0, "scale must be positive")
    require(
        cache_NPL.dtype in (q_THL.dtype, *EIGHT_BITS) or (q_THL.is_cpu and cache_NPL.dtype is torch.bfloat16),
        "the cache must have the queries' dtype, float8_e4m3fn or int8, or bfloat16 on a CPU",
    )
    scales = latent_scale_NP, rotated_scale_NP
    require_latent_scales(LatentCache(cache_NPL, value_width, *scales))
    blocks, places, width = cache_NPL.shape
    k_NGPL = cache_NPL.view(blocks, 1, places, width)
    v_NGPV = k_NGPL.as_strided((blocks, 1, places, value_width), k_NGPL.stride())
    sequences = query_start_S1, context_len_S, block_table_SB
    if q_THL.is_cpu and _cpu().fits(q_THL, k_NGPL, v_NGPV, block_table_SB):
        fast: Tensor = _cpu().paged_attention(q_THL, k_NGPL, v_NGPV, *sequences, scale, None)
        return fast
    if q_THL.is_cuda and _kernel().fits(q_THL, cache_NPL, value_width):
        on_gpu: Tensor = _kernel().mla_attention(
            q_THL, cache_NPL, value_width, *sequences, scale, *scales, num_decode=num_decode, max_context=max_context
        )
        return on_gpu
    if q_THL.is_cuda:
        require(
            latent_scale_NP is None,
            f"no kernel on this GPU reads rows of {width} int8, {value_width} of them the value: keep more bits",
        )
        return batched.paged_attention(
            q_THL,
            k_NGPL,
            v_NGPV,
            *sequences,
            scale,
            None,
            None,
            num_decode=num_decode,
            max_query=max_query,
            max_context=max_context,
        )
    return reference.mla_attention(q_THL, cache_NPL, value_width, *sequences, scale, *scales)
