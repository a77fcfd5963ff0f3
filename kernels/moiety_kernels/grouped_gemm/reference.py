"""Definition of the grouped products.

T tokens, K experts per token, R = T · K pairs, E experts, D model and F expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.moe.activation import SILU
from moiety_kernels.moe.reference import activate

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.moe.activation import Activation
    from moiety_kernels.route import Groups


LARGEST = 448.0  # of float8_e4m3fn


def up(
    x_TD: Tensor,
    groups: Groups,
    top_k: int,
    w_gate_up_E2FD: Tensor,
    scale: Tensor | None = None,
    bias_E2F: Tensor | None = None,
    activation: Activation = SILU,
) -> Tensor:
    """Return [R, F], in the order of the groups: the activation of each row's gate and up products."""
    expert_R = _expert_of_row(groups)
    rows = x_TD[groups.order_R.long() // top_k].float()
    gate_up = torch.einsum("rd,rfd->rf", rows, widened(w_gate_up_E2FD, scale)[expert_R])
    if bias_E2F is not None:
        gate_up += bias_E2F[expert_R]
    return activate(gate_up, activation).to(x_TD.dtype)


def down(
    inner_RF: Tensor,
    groups: Groups,
    weight_TK: Tensor,
    w_down_EDF: Tensor,
    scale: Tensor | None = None,
    bias_ED: Tensor | None = None,
) -> Tensor:
    """Return [R, D], in the order of the pairs: each row's product times its routing weight."""
    expert_R = _expert_of_row(groups)
    rows = torch.einsum("rf,rdf->rd", inner_RF.float(), widened(w_down_EDF, scale)[expert_R])
    if bias_ED is not None:
        rows += bias_ED[expert_R]
    weighted = torch.empty_like(rows)
    weighted[groups.order_R.long()] = rows * weight_TK.flatten()[groups.order_R.long()].unsqueeze(1)
    return weighted.to(inner_RF.dtype)


def widened(w_ENK: Tensor, scale: Tensor | None) -> Tensor:
    """Return float32 weights, times the scale of their row, [E, N], or of their row's block of 128, [E, N, K ÷ 128]."""
    wide = w_ENK.float()
    if scale is None:
        return wide
    if scale.dim() == 2:
        return wide * scale.unsqueeze(-1)
    return wide * scale.repeat_interleave(128, 2)[..., : w_ENK.shape[2]]


def rounded(rows: Tensor, columns: int) -> tuple[Tensor, Tensor]:
    """Return (float8_e4m3fn, float32 scales) per `columns` of a row; the scale maps their largest number to 448."""
    width = rows.shape[1]
    groups = functional.pad(rows.float(), (0, -width % columns)).view(rows.shape[0], -1, columns)
    largest = groups.abs().amax(-1, keepdim=True)
    largest = torch.where(largest > 0, largest, 1.0)
    values = (groups * (LARGEST / largest)).to(torch.float8_e4m3fn)
    return values.flatten(1)[:, :width], (largest / LARGEST).squeeze(-1)


def unrounded(values: Tensor, scale: Tensor, columns: int) -> Tensor:
    """Return the float32 rows that `rounded` numbers represent, which are multiplied in their place."""
    return values.float() * scale.repeat_interleave(columns, 1)[:, : values.shape[1]]


def combine(weighted_RD: Tensor, top_k: int) -> Tensor:
    """Return [T, D]: the sum of each token's rows."""
    return weighted_RD.view(-1, top_k, weighted_RD.shape[1]).float().sum(1).to(weighted_RD.dtype)


def _expert_of_row(groups: Groups) -> Tensor:
    rows = torch.arange(groups.order_R.numel(), device=groups.order_R.device, dtype=groups.starts_E1.dtype)
    return torch.searchsorted(groups.starts_E1[1:].contiguous(), rows, right=True)
