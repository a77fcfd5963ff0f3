"""Paged attention through torch's own attention, for GPUs: gathers the cache, without a host synchronisation.

T tokens, S sequences, Q padded queries, B blocks per row, C padded context, H query heads, G key-value heads, d head
width, N blocks, P slots per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.paged_attention.inputs import AttentionMetadata

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionParameters

WORKSPACE_BYTES = 1 << 30  # for gathered keys and values; the engine reserves it beside the cache
COPIES = 2  # for gather and mask
SINK_WIDTH = 8  # entries that a sink adds to a head: a single one would leave the heads' rows unaligned


def paged_attention(
    q_THd: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
    workspace_bytes: int = WORKSPACE_BYTES,
) -> Tensor:
    """Return out_THd.

    Sequences with one query are not padded to the length of the others' chunks. One group of sequences at a time is
    gathered, so that `workspace_bytes` bounds the copies however long the longest context is.
    """
    k_NGPd, num_sequences, num_decode = cache.k_NGPd, metadata.context_len_S.shape[0], metadata.num_decode
    width = -(-metadata.max_context // k_NGPd.shape[2])
    copies = COPIES if parameters.sinks_H is None else COPIES + 1
    bytes_an_entry = copies * q_THd.itemsize + (k_NGPd.itemsize if k_NGPd.dtype is not q_THd.dtype else 0)
    bytes_each = 2 * k_NGPd[0].numel() * width * bytes_an_entry
    group = max(1, workspace_bytes // bytes_each)
    parts = [(begin, min(begin + group, num_decode), 1) for begin in range(0, num_decode, group)]
    parts += [
        (begin, min(begin + group, num_sequences), metadata.max_query)
        for begin in range(num_decode, num_sequences, group)
    ]
    out_THd = q_THd.new_empty(*q_THd.shape[:2], cache.v_NGPd.shape[3])
    for begin, end, longest in parts:
        some = AttentionMetadata(
            metadata.query_start_S1[begin : end + 1],
            metadata.context_len_S[begin:end],
            metadata.block_table_SB[begin:end, :width],
            longest,
            metadata.max_context,
        )
        _attend(out_THd, q_THd, cache, some, parameters)
    return out_THd


def _attend(
    out_THd: Tensor, q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> None:
    """Write the rows of these sequences, each padded to `max_query` queries; no padded row is written."""
    device, num_tokens, max_query = q_THd.device, q_THd.shape[0], metadata.max_query
    window, table_SB = parameters.window, metadata.block_table_SB.long()
    start_S1, context_S1 = metadata.query_start_S1.long(), metadata.context_len_S.long()[:, None]
    at_Q = torch.arange(max_query, device=device)
    row_SQ = start_S1[:-1, None] + at_Q
    position_SQ = context_S1 - start_S1.diff()[:, None] + at_Q
    key_C = torch.arange(table_SB.shape[1] * cache.k_NGPd.shape[2], device=device)
    seen_SQC = key_C <= position_SQ[..., None]
    read_SC = key_C < context_S1
    if window is not None:  # blocks behind the window may have any content
        first_SQ = position_SQ // window * window if parameters.chunked else position_SQ - window + 1
        seen_SQC &= key_C >= first_SQ[..., None]
        read_SC &= key_C >= first_SQ[:, :1]
    read_S1C1 = read_SC[:, None, :, None]

    def gathered(cache_NGPd: Tensor, scale_NGP: Tensor | None) -> Tensor:
        rows = cache_NGPd[table_SB].transpose(1, 2).flatten(2, 3).to(q_THd.dtype)
        if scale_NGP is not None:
            rows = (rows * scale_NGP[table_SB].transpose(1, 2).flatten(2)[..., None]).to(q_THd.dtype)
        return rows.masked_fill(~read_S1C1, 0)

    k_SGCd, v_SGCd = gathered(cache.k_NGPd, cache.k_scale_NGP), gathered(cache.v_NGPd, cache.v_scale_NGP)
    q_SHQd = q_THd[row_SQ.clamp(max=num_tokens - 1)].transpose(1, 2)
    if parameters.sinks_H is not None:
        q_SHQd, k_SGCd, v_SGCd = _with_sinks(q_SHQd, k_SGCd, v_SGCd, parameters.sinks_H / parameters.scale)
        seen_SQC = functional.pad(seen_SQC, (0, 1), value=True)
    out_SHQd = functional.scaled_dot_product_attention(
        q_SHQd, k_SGCd, v_SGCd, seen_SQC[:, None], scale=parameters.scale, enable_gqa=True
    )
    if max_query == 1:
        out_THd.index_copy_(0, row_SQ[:, 0], out_SHQd[:, :, 0])
        return
    token_T = torch.arange(num_tokens, device=device)
    sequence_T = (torch.searchsorted(start_S1, token_T, right=True) - 1).clamp(0, len(start_S1) - 2)
    place_T = (token_T - start_S1[sequence_T]).clamp(0, max_query - 1)
    ours_T = (token_T >= start_S1[0]) & (token_T < start_S1[-1])
    out_THd.copy_(torch.where(ours_T[:, None, None], out_SHQd[sequence_T, :, place_T], out_THd))


def _with_sinks(q_SHQd: Tensor, k_SGCd: Tensor, v_SGCd: Tensor, sinks_H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values with one more key per sink.

    The product of that key with a query of head h is sinks_H[h], and its value is zero: a query carries its sink in an
    entry that is 1 in that key and 0 in all others.
    """
    width = q_SHQd.shape[3]
    q_SHQd = functional.pad(q_SHQd, (0, SINK_WIDTH))
    q_SHQd[..., width] = sinks_H[:, None]
    k_SGCd = functional.pad(k_SGCd, (0, SINK_WIDTH, 0, 1))
    k_SGCd[..., -1, width] = 1
    return q_SHQd, k_SGCd, functional.pad(v_SGCd, (0, 0, 0, 1))
