"""Attention over one shard of a paged cache in torch operations, for GPUs, without a host synchronisation.

Keys are gathered and processed in pieces with a running softmax, so that the longest context does not bound the memory.
T tokens, S sequences, Q padded queries, B blocks of a piece, C slots of a piece, H query heads, G key-value heads, R
query heads per key-value head, d head width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters

KEYS_AT_ONCE, QUERIES_AT_ONCE = 1024, 256
SCORES_AT_ONCE = 1 << 26  # of all sequences of a group


def shard_attention(
    q_THd: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
    keys_at_once: int = KEYS_AT_ONCE,
    queries_at_once: int = QUERIES_AT_ONCE,
) -> tuple[Tensor, Tensor]:
    """Return out_THd and lse_TH, both float32; see `moiety_kernels.shard_attention.ShardResult`."""
    num_sequences, num_decode, num_heads = metadata.context_len_S.shape[0], metadata.num_decode, q_THd.shape[1]
    tokens = q_THd.shape[0]  # one row more takes what belongs to padding
    out_THd = torch.zeros(tokens + 1, num_heads, cache.v_NGPd.shape[3], device=q_THd.device)
    lse_TH = torch.full((tokens + 1, num_heads), float("-inf"), device=q_THd.device)
    results = out_THd, lse_TH
    for begin, end, longest in ((0, num_decode, 1), (num_decode, num_sequences, metadata.max_query)):
        queries = min(longest, queries_at_once)
        group = max(1, SCORES_AT_ONCE // max(1, num_heads * queries * keys_at_once))
        for first in range(begin, end, group):
            some = slice(first, min(first + group, end))
            for query in range(0, longest, queries_at_once):
                at_Q = torch.arange(query, min(query + queries_at_once, longest), device=q_THd.device)
                _attend(results, q_THd, cache, metadata, parameters, some, at_Q, keys_at_once)
    return out_THd[:tokens], lse_TH[:tokens]


def _attend(
    results: tuple[Tensor, Tensor],
    q_THd: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
    some: slice,
    at_Q: Tensor,
    keys_at_once: int,
) -> None:
    """Write the rows of the queries `at_Q` of some sequences that have them."""
    device, places, num_kv_heads = q_THd.device, cache.k_NGPd.shape[2], cache.k_NGPd.shape[1]
    start_S1 = metadata.query_start_S1.long()
    begin_S1, end_S1 = start_S1[:-1][some, None], start_S1[1:][some, None]
    context_S1 = metadata.context_len_S.long()[some, None]
    row_SQ = begin_S1 + at_Q
    exists_SQ = row_SQ < end_S1
    position_SQ = context_S1 - (end_S1 - begin_S1) + at_Q
    first_SQ, window = torch.zeros_like(position_SQ), parameters.window
    if window is not None:
        first_SQ = position_SQ // window * window if parameters.chunked else position_SQ - window + 1
    q_SQH = q_THd[row_SQ.clamp(max=len(q_THd) - 1)].float()
    num_sequences, num_queries = row_SQ.shape
    q_SGRQd = q_SQH.view(num_sequences, num_queries, num_kv_heads, -1, q_THd.shape[2]).permute(0, 2, 3, 1, 4)
    largest = q_SGRQd.new_full(q_SGRQd.shape[:4], float("-inf"))
    total, sums = torch.zeros_like(largest), q_SGRQd.new_zeros(*q_SGRQd.shape[:4], cache.v_NGPd.shape[3])
    num_blocks = -(-metadata.max_context // (places * metadata.num_shards))
    blocks_at_once = max(1, keys_at_once // places)
    for block in range(0, num_blocks, blocks_at_once):
        table_SB = metadata.block_table_SB[some, block : min(block + blocks_at_once, num_blocks)].long()
        slot_C = torch.arange(block * places, (block + table_SB.shape[1]) * places, device=device)
        at_C = slot_C * metadata.num_shards + metadata.shard
        seen_SQC = (at_C <= position_SQ[..., None]) & (at_C >= first_SQ[..., None]) & exists_SQ[..., None]
        read_SC = seen_SQC.any(1)
        k_SGCd = _gathered(cache.k_NGPd, cache.k_scale_NGP, table_SB, read_SC)
        v_SGCd = _gathered(cache.v_NGPd, cache.v_scale_NGP, table_SB, read_SC)
        scores = torch.einsum("sgrqd,sgcd->sgrqc", q_SGRQd, k_SGCd) * parameters.scale
        scores = scores.masked_fill(~seen_SQC[:, None, None], float("-inf"))
        higher = torch.maximum(largest, scores.amax(-1))
        base = torch.where(higher.isinf(), 0.0, higher)
        weights, shrink = torch.exp(scores - base.unsqueeze(-1)), torch.exp(largest - base)
        total = total * shrink + weights.sum(-1)
        sums = sums * shrink.unsqueeze(-1) + torch.einsum("sgrqc,sgcd->sgrqd", weights, v_SGCd)
        largest = higher
    sums = sums / torch.where(total > 0, total, 1.0).unsqueeze(-1)
    lse_SQH = (largest + total.log()).permute(0, 3, 1, 2).flatten(2)
    out_SQHd = sums.permute(0, 3, 1, 2, 4).flatten(2, 3)
    row_K = torch.where(exists_SQ, row_SQ, len(q_THd)).flatten()
    for result, values in zip(results, (out_SQHd, lse_SQH), strict=True):
        result.index_copy_(0, row_K, values.flatten(0, 1))


def _gathered(cache_NGPd: Tensor, scale_NGP: Tensor | None, table_SB: Tensor, read_SC: Tensor) -> Tensor:
    """Return the rows of these blocks as float32, [S, G, C, d]; those that no query sees are 0."""
    rows = cache_NGPd[table_SB].transpose(1, 2).flatten(2, 3).float()
    if scale_NGP is not None:
        rows = rows * scale_NGP[table_SB].transpose(1, 2).flatten(2)[..., None]
    return rows.masked_fill(~read_SC[:, None, :, None], 0)
