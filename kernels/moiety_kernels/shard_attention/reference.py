"""Definition of attention over one shard of a paged cache.

T tokens, S sequences, B blocks per row, H query heads, G key-value heads, d head width, N blocks, P slots per block, C
slots of a context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters


def shard_attention(
    q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> tuple[Tensor, Tensor]:
    """Return out_THd and lse_TH, both float32, of each query and the positions of the shard that it sees.

    A query that sees none gets 0 and -inf. Slots that no query sees may have any content.
    """
    num_kv_heads, places = cache.k_NGPd.shape[1:3]
    repeat, window = q_THd.shape[1] // num_kv_heads, parameters.window
    out_THd = torch.zeros(*q_THd.shape[:2], cache.v_NGPd.shape[3], device=q_THd.device)
    lse_TH = torch.full(q_THd.shape[:2], float("-inf"), device=q_THd.device)
    starts = metadata.query_start_S1.tolist()
    for s, context in enumerate(metadata.context_len_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        positions_C = torch.arange(
            metadata.shard, max(context, metadata.shard), metadata.num_shards, device=q_THd.device
        )
        if begin == end or not len(positions_C):
            continue
        query_at = torch.arange(context - (end - begin), context, device=q_THd.device)[:, None]
        seen_QC = positions_C <= query_at
        if window is not None:
            first = query_at // window * window if parameters.chunked else query_at - window + 1
            seen_QC &= positions_C >= first
        slot_C = torch.arange(len(positions_C), device=q_THd.device)
        block_C = metadata.block_table_SB[s].long()[slot_C // places]
        some_C11 = seen_QC.any(0)[:, None, None]
        k, v = (
            torch.where(some_C11, part[block_C, :, slot_C % places].float(), 0.0)
            * (1.0 if scale is None else torch.where(some_C11, scale[block_C, :, slot_C % places, None], 0.0))
            for part, scale in ((cache.k_NGPd, cache.k_scale_NGP), (cache.v_NGPd, cache.v_scale_NGP))
        )
        q = q_THd[begin:end].float().reshape(end - begin, num_kv_heads, repeat, -1)
        scores = torch.einsum("qgrd,kgd->qgrk", q, k) * parameters.scale
        scores = scores.masked_fill(~seen_QC[:, None, None], float("-inf"))
        lse = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1))
        out_THd[begin:end] = torch.einsum("qgrk,kgd->qgrd", weights, v).flatten(1, 2)
        lse_TH[begin:end] = lse.flatten(1)
    return out_THd, lse_TH
