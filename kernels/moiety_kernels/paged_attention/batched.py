"""Paged attention through torch's own attention, for GPUs: gathers the cache, never waits for the device.

T tokens, S sequences, Q padded queries, B blocks a row, C padded context, H query heads, G key-value heads, d head
width, N blocks, P places a block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def paged_attention(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    window: int | None,
    *,
    num_decode: int,
    max_query: int,
    max_context: int,
) -> Tensor:
    """out_THd. The sequences with one query are not padded to the length of the others' chunks."""
    parts = [(0, num_decode, 1, 0, num_decode)] if num_decode else []
    if num_decode < context_len_S.shape[0]:
        parts.append((num_decode, context_len_S.shape[0], max_query, num_decode, q_THd.shape[0]))
    outputs = [
        _padded(
            q_THd[first:last],
            k_cache_NGPd,
            v_cache_NGPd,
            query_start_S1[begin : end + 1] - first,
            context_len_S[begin:end],
            block_table_SB[begin:end, : -(-max_context // k_cache_NGPd.shape[2])],
            scale,
            window,
            longest,
        )
        for begin, end, longest, first, last in parts
    ]
    return torch.cat(outputs) if outputs else torch.empty_like(q_THd)


def _padded(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    window: int | None,
    max_query: int,
) -> Tensor:
    device, tokens = q_THd.device, q_THd.shape[0]
    start_S1, context_S1 = query_start_S1.long(), context_len_S.long()[:, None]
    at_Q = torch.arange(max_query, device=device)
    row_SQ = (start_S1[:-1, None] + at_Q).clamp(max=tokens - 1)
    position_SQ = context_S1 - start_S1.diff()[:, None] + at_Q
    key_C = torch.arange(block_table_SB.shape[1] * k_cache_NGPd.shape[2], device=device)
    seen_SQC = key_C <= position_SQ[..., None]
    if window is not None:
        seen_SQC &= key_C > position_SQ[..., None] - window
    stored_S1C1 = (key_C < context_S1)[:, None, :, None]
    k_SGCd, v_SGCd = (
        cache[block_table_SB.long()].transpose(1, 2).flatten(2, 3).masked_fill(~stored_S1C1, 0)
        for cache in (k_cache_NGPd, v_cache_NGPd)
    )
    out_SHQd = functional.scaled_dot_product_attention(
        q_THd[row_SQ].transpose(1, 2), k_SGCd, v_SGCd, seen_SQC[:, None], scale=scale, enable_gqa=True
    )
    token_T = torch.arange(tokens, device=device)
    sequence_T = torch.searchsorted(start_S1, token_T, right=True) - 1
    return out_SHQd[sequence_T, :, token_T - start_S1[sequence_T]]
