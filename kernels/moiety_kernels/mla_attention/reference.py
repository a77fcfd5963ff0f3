"""Definition of multi-head latent attention in its absorbed form (DeepSeek-V2, 2405.04434).

T tokens, S sequences, B blocks per row, H query heads, N blocks, P slots per block, L width of a cache row, V of a
value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


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
) -> Tensor:
    """Return out_THV: each sequence's queries are its last tokens in the cache; query i sees positions up to its own.

    The row of a position is the key of all heads, its first V entries are the value. A quantized cache may hold a row's
    first V entries, and those after them, each divided by their own scale.
    """
    if latent_scale_NP is not None and rotated_scale_NP is not None:
        cache_NPL = unscaled(cache_NPL, value_width, latent_scale_NP, rotated_scale_NP)
    out_THV = q_THL.new_empty(*q_THL.shape[:2], value_width)
    starts = query_start_S1.tolist()
    for s, context in enumerate(context_len_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        blocks = block_table_SB[s, : -(-context // cache_NPL.shape[1])].long()
        rows_CL = cache_NPL[blocks].flatten(0, 1)[:context].float()
        scores_HQC = torch.einsum("qhl,cl->hqc", q_THL[begin:end].float(), rows_CL) * scale
        key_at = torch.arange(context, device=q_THL.device)
        query_at = torch.arange(context - (end - begin), context, device=q_THL.device)[:, None]
        weights_HQC = torch.softmax(scores_HQC.masked_fill(key_at > query_at, float("-inf")), dim=-1)
        out_THV[begin:end] = torch.einsum("hqc,cv->qhv", weights_HQC, rows_CL[:, :value_width]).to(q_THL.dtype)
    return out_THV


def unscaled(cache_NPL: Tensor, value_width: int, latent_scale_NP: Tensor, rotated_scale_NP: Tensor) -> Tensor:
    """Return the values of quantized rows, float32."""
    latent, rotated = cache_NPL.float().tensor_split([value_width], dim=-1)
    return torch.cat((latent * latent_scale_NP[..., None], rotated * rotated_scale_NP[..., None]), dim=-1)
