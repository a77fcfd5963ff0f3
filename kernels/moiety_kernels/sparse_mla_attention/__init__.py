"""Latent attention over a few selected tokens of each query: the sparse attention of DeepSeek-V3.2."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require, require_shape
from moiety_kernels.kv_store.caches import LatentCache
from moiety_kernels.latent_input import require_latent_scales
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.mla_attention import mla_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor


_kernel = lazy_import(__name__, "kernel")
_TOKENS_AT_ONCE = 64


def sparse_mla_attention(
    q_THL: Tensor, cache: LatentCache, slot_TK: Tensor, count_T: Tensor, scale: float, *, num_decode: int = 0
) -> Tensor:
    """Return out_THV: attention of query t to the first count[t] of the cache slots in slot[t], both int32.

    A slot is block · P + offset. The first `num_decode` tokens are decodes. Everything else is as in `mla_attention`.
    On a CPU it is that operation, with each query a sequence of its own whose blocks have one slot.
    """
    tokens, most = slot_TK.shape
    require_shape("q", q_THL, (tokens, -1, cache.rows_NPL.shape[2]))
    require_shape("count", count_T, (tokens,))
    require(slot_TK.dtype is torch.int32 and count_T.dtype is torch.int32, "slots and counts must be int32")
    require_latent_scales(cache)
    if q_THL.is_cuda and _kernel().fits(q_THL, cache):
        on_gpu: Tensor = _kernel().sparse_mla_attention(q_THL, cache, slot_TK, count_T, scale, num_decode=num_decode)
        return on_gpu
    rows = _blocks_of_one(cache)
    at_once = tokens if q_THL.is_cpu else max(num_decode, _TOKENS_AT_ONCE)  # without a kernel, rows are gathered first
    parts = [
        mla_attention(
            q_THL[first : first + at_once],
            rows,
            AttentionMetadata(
                torch.arange(min(at_once, tokens - first) + 1, dtype=torch.int32, device=q_THL.device),
                count_T[first : first + at_once],
                slot_TK[first : first + at_once],
                max_query=1,
                max_context=most,
                num_decode=min(num_decode, at_once) if first == 0 else 0,
            ),
            scale,
        )
        for first in range(0, tokens, max(1, at_once))
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _blocks_of_one(cache: LatentCache) -> LatentCache:
    """Return the cache with each slot as a block of its own."""
    blocks, places, width = cache.rows_NPL.shape
    scales = cache.latent_scale_NP, cache.rotated_scale_NP
    of_slots = [None if scale_NP is None else scale_NP.view(blocks * places, 1) for scale_NP in scales]
    return LatentCache(cache.rows_NPL.view(blocks * places, 1, width), cache.latent_width, *of_slots)
