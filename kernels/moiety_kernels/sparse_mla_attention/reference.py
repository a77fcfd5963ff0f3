"""Definition of latent attention over selected rows of the cache (DeepSeek-V3.2-Exp, 2025).

T tokens, K slots per token, H query heads, N blocks, P slots per block, L width of a cache row, V of a value.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.mla_attention.reference import unscaled

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LatentCache


def sparse_mla_attention(q_THL: Tensor, cache: LatentCache, slot_TK: Tensor, count_T: Tensor, scale: float) -> Tensor:
    """Return out_THV: each query attends to the rows in its first `count` slots; scales are as in `mla_attention`."""
    rows_NPL, value_width = unscaled(cache), cache.latent_width
    out_THV = q_THL.new_empty(*q_THL.shape[:2], value_width)
    for t, count in enumerate(count_T.tolist()):
        rows_KL = rows_NPL.flatten(0, 1)[slot_TK[t, :count].long()].float()
        weights_HK = torch.softmax(q_THL[t].float() @ rows_KL.T * scale, dim=-1)
        out_THV[t] = (weights_HK @ rows_KL[:, :value_width]).to(q_THL.dtype)
    return out_THV
