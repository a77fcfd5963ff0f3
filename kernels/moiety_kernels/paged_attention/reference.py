"""Definition of causal attention over a paged cache.

T tokens, S sequences, B blocks per row, H query heads, G key-value heads, d head width, N blocks, P slots per block.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters


def paged_attention(
    q_THd: Tensor, cache: LayerCache, metadata: AttentionMetadata, parameters: AttentionParameters
) -> Tensor:
    """Return attention of each sequence's queries, which are its last tokens in the cache.

    Query i sees positions up to its own, only the last `window` if that is set, or with `chunked` those of its own
    chunk of `window` positions (Llama 4). A head's sink is a score whose share of
    the softmax is discarded. Slots beyond a sequence's context and blocks behind its window are never read. A value may
    be narrower than a key; the output is as wide as a value. A quantized cache may hold keys and values divided by
    their own scales.
    """
    (num_kv_heads, places), window = cache.k_NGPd.shape[1:3], parameters.window
    repeat = q_THd.shape[1] // num_kv_heads
    out_THd = q_THd.new_empty(*q_THd.shape[:2], cache.v_NGPd.shape[3])
    starts = metadata.query_start_S1.tolist()
    for s, context in enumerate(metadata.context_len_S.tolist()):
        begin, end = starts[s], starts[s + 1]
        if begin == end:
            continue
        query_at = torch.arange(context - (end - begin), context, device=q_THd.device)[:, None]
        first_seen = torch.zeros_like(query_at)
        if window is not None:
            first_seen = query_at // window * window if parameters.chunked else (query_at - window + 1).clamp(min=0)
        lowest = int(first_seen[0]) // places * places
        blocks = metadata.block_table_SB[s, lowest // places : -(-context // places)].long()
        k, v = (
            part[blocks].transpose(1, 2).reshape(-1, num_kv_heads, part.shape[3])[: context - lowest].float()
            * (1.0 if scale is None else scale[blocks].transpose(1, 2).reshape(-1, num_kv_heads, 1)[: context - lowest])
            for part, scale in ((cache.k_NGPd, cache.k_scale_NGP), (cache.v_NGPd, cache.v_scale_NGP))
        )
        scores = (
            torch.einsum("qgrd,kgd->grqk", q_THd[begin:end].float().reshape(end - begin, num_kv_heads, repeat, -1), k)
            * parameters.scale
        )
        key_at = torch.arange(lowest, context, device=q_THd.device)
        hidden = (key_at > query_at) | (key_at < first_seen)
        scores = scores.masked_fill(hidden, float("-inf"))
        if parameters.sinks_H is not None:
            sinks = parameters.sinks_H.float().view(num_kv_heads, repeat, 1, 1).expand(-1, -1, end - begin, 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = torch.softmax(scores, dim=-1)[..., : context - lowest]
        out_THd[begin:end] = torch.einsum("grqk,kgd->qgrd", weights, v).flatten(1, 2).to(q_THd.dtype)
    return out_THd
