"""The expert layer through torch's grouped matrix product, for GPUs in 16 bits, without a host synchronisation.

T tokens, K experts per token, R = T · K routed rows, E experts, D model width, F expert width.
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

_ALIGNMENT = 8  # 16-bit elements in 16 bytes, the row alignment that the product requires


def fits(x_TD: Tensor, w_down_EDF: Tensor) -> bool:
    """Return whether `experts` supports these tensors."""
    _, width, hidden = w_down_EDF.shape
    return (
        hasattr(functional, "grouped_mm")
        and x_TD.dtype is torch.bfloat16
        and w_down_EDF.dtype is torch.bfloat16
        and x_TD.shape[0] > 0
        and width % _ALIGNMENT == 0
        and hidden % _ALIGNMENT == 0
    )


def experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Tensor,
    w_down_EDF: Tensor,
    *,
    activation: Activation = SILU,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token, summed in the order of k.

    A negative number stands for an expert on another rank and adds nothing.
    """
    tokens, top_k = expert_TK.shape
    num_experts = w_down_EDF.shape[0]
    chosen_R = expert_TK.flatten()
    chosen_R = torch.where(chosen_R < 0, num_experts, chosen_R)  # sorted after all rows that are multiplied
    order_R = torch.argsort(chosen_R, stable=True)
    sorted_R = chosen_R[order_R]
    ends_E = torch.searchsorted(
        sorted_R, torch.arange(num_experts, device=x_TD.device, dtype=chosen_R.dtype), right=True
    ).to(torch.int32)
    own_R, biased_R = sorted_R < num_experts, sorted_R.clamp(max=num_experts - 1)
    gate_up_R2F = functional.grouped_mm(x_TD[order_R // top_k], w_gate_up_E2FD.transpose(1, 2), offs=ends_E)
    if gate_up_bias_E2F is not None:
        gate_up_R2F = (gate_up_R2F + gate_up_bias_E2F[biased_R]).to(x_TD.dtype)
    down_RD = functional.grouped_mm(activate(gate_up_R2F, activation), w_down_EDF.transpose(1, 2), offs=ends_E)
    if down_bias_ED is not None:
        down_RD = (down_RD + down_bias_ED[biased_R]).to(x_TD.dtype)
    y_RD = torch.empty_like(down_RD)
    y_RD[order_R] = torch.where(own_R.unsqueeze(1), down_RD, 0)
    y_TKD = y_RD.view(tokens, top_k, -1) * weight_TK.unsqueeze(-1).to(x_TD.dtype)
    return torch.sum(y_TKD, dim=1)
