"""Definition of LoRA products, and their GPU implementation: batched products over gathered factors.

The host does not wait for the device. T tokens, R rows, K pairs per token, S slots, P parts, r rank, D input and N
output width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.low_rank.factors import Factors

_GATHERED_BYTES = 256 << 20  # limit on the factors that are gathered for some rows at once


def products(x_RD: Tensor, factors: Factors, index_R: Tensor) -> Tensor:
    """Return each row's product with its factors; zeros where the index is negative."""
    some = max(1, _GATHERED_BYTES // max(1, factors.down_SRD[0].nbytes + factors.up_SrN[0].nbytes))
    parts = [
        _products(x_RD[first : first + some], factors, index_R[first : first + some])
        for first in range(0, x_RD.shape[0], some)
    ]
    return torch.cat(parts) if parts else x_RD.new_zeros(0, sum(factors.widths))


def _products(x_RD: Tensor, factors: Factors, index_R: Tensor) -> Tensor:
    there_R = index_R.clamp(min=0)
    inner_RP = torch.bmm(factors.down_SRD[there_R], x_RD.unsqueeze(2)).squeeze(2)
    up_RrN = factors.up_SrN[there_R]
    inner, outer = torch.split(inner_RP, factors.rank, dim=1), torch.split(up_RrN, list(factors.widths), dim=2)
    found = [torch.bmm(part.unsqueeze(1), up).squeeze(1) for part, up in zip(inner, outer, strict=True)]
    return torch.where(index_R.unsqueeze(1) < 0, 0.0, torch.cat(found, dim=1))


def add(out_TN: Tensor, x_TD: Tensor, factors: Factors, slot_T: Tensor) -> None:
    """Add out[t] += up[slot[t]] · down[slot[t]] · x[t] for the tokens with a slot."""
    out_TN += products(x_TD, factors, slot_T)


def expert_index(slot_T: Tensor, expert_TK: Tensor, num_experts: int) -> Tensor:
    """Return the index of each pair's factors, -1 where there are none."""
    index_TK = slot_T.unsqueeze(1) * num_experts + expert_TK
    return torch.where((slot_T.unsqueeze(1) < 0) | (expert_TK < 0), -1, index_TK)
