"""Definition of multi-head latent attention in its absorbed form (DeepSeek-V2, 2405.04434).

T tokens, S sequences, B blocks per row, H query heads, N blocks, P slots per block, L width of a cache row, V of a
value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata


def mla_attention(q_THL: Tensor, cache: LatentCache, metadata: AttentionMetadata, scale: float) -> Tensor:
    """Return out_THV: each sequence's queries are its last tokens in the cache; query i sees positions up to its own.

    The row of a position is the key of all heads, its first V entries are the value. A quantized cache may hold a row's
    first V entries, and those after them, each divided by their own scale.
    """
    rows_NPL, value_width = unscaled(cache), cache.latent_width
    out_THV = q_THL.new_empty(*q_THL.shape[:2], value_width)
    starts = metadata.query_start_S1.tolist()
    for s, context in enumerate(metadata.context_len_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        blocks = metadata.block_table_SB[s, : -(-context // rows_NPL.shape[1])].long()
        rows_CL = rows_NPL[blocks].flatten(0, 1)[:context].float()
        scores_HQC = torch.einsum("qhl,cl->hqc", q_THL[begin:end].float(), rows_CL) * scale
        key_at = torch.arange(context, device=q_THL.device)
        query_at = torch.arange(context - (end - begin), context, device=q_THL.device)[:, None]
        weights_HQC = torch.softmax(scores_HQC.masked_fill(key_at > query_at, float("-inf")), dim=-1)
        out_THV[begin:end] = torch.einsum("hqc,cv->qhv", weights_HQC, rows_CL[:, :value_width]).to(q_THL.dtype)
    return out_THV


def unscaled(cache: LatentCache) -> Tensor:
    """Return rows_NPL: the values of quantized rows, float32, or the cache's own rows if it has no scales."""
    if cache.latent_scale_NP is None or cache.rotated_scale_NP is None:
        return cache.rows_NPL
    latent, rotated = cache.rows_NPL.float().tensor_split([cache.latent_width], dim=-1)
    return torch.cat((latent * cache.latent_scale_NP[..., None], rotated * cache.rotated_scale_NP[..., None]), dim=-1)
