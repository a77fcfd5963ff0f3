"""The expert layer with LoRA adapters in torch: their products are added before the activation and the weighted sum.

It is the definition, and the GPU implementation, where 16-bit types need no host synchronisation.

T tokens, K experts per token, R = T · K routed rows, E experts, D model width, F expert width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from moiety_kernels.linear import linear
from moiety_kernels.low_rank.reference import expert_index, products
from moiety_kernels.moe import grouped
from moiety_kernels.moe.reference import activate

if TYPE_CHECKING:
    from moiety_kernels.low_rank import Factors, FeedForwardFactors
    from moiety_kernels.moe.activation import Activation
    from moiety_kernels.quantization import Weight


def experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Weight,
    w_down_EDF: Weight,
    activation: Activation,
    gate_up_bias_E2F: Tensor | None,
    down_bias_ED: Tensor | None,
    adapters: FeedForwardFactors,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token, summed in the order of k; a negative expert is on another rank."""
    tokens, top_k = expert_TK.shape
    num_experts = w_down_EDF.shape[0]
    chosen_R = torch.where(expert_TK < 0, num_experts, expert_TK).flatten()  # pairs of other ranks come last
    order_R = torch.argsort(chosen_R, stable=True)
    sorted_R, x_RD = chosen_R[order_R], x_TD[order_R // top_k]
    own_R = (sorted_R < num_experts).unsqueeze(1)
    index_R = expert_index(adapters.slot_T, expert_TK, num_experts).flatten()[order_R]
    up_R2F = _product(x_RD, w_gate_up_E2FD, gate_up_bias_E2F, sorted_R, adapters.gate_up, index_R)
    inner_RF = torch.where(own_R, activate(up_R2F, activation), 0.0)
    down_RD = _product(inner_RF, w_down_EDF, down_bias_ED, sorted_R, adapters.down, index_R)
    y_RD = torch.empty_like(down_RD)
    y_RD[order_R] = torch.where(own_R, down_RD, 0.0)
    return torch.sum(y_RD.view(tokens, top_k, -1) * weight_TK.unsqueeze(-1).to(x_TD.dtype), dim=1)


def _product(
    x_RD: Tensor, w_END: Weight, bias_EN: Tensor | None, expert_R: Tensor, factors: Factors | None, index_R: Tensor
) -> Tensor:
    """Return each row's product with its expert, plus its adapter's product; rows are in the order of their experts."""
    num_experts = w_END.shape[0]
    if x_RD.is_cuda and isinstance(w_END, Tensor) and grouped.fits(x_RD, w_END):
        every = torch.arange(num_experts, device=x_RD.device, dtype=expert_R.dtype)
        ends_E = torch.searchsorted(expert_R, every, right=True).to(torch.int32)
        out_RN = functional.grouped_mm(x_RD, w_END.transpose(1, 2), offs=ends_E)
    else:
        out_RN = x_RD.new_zeros(x_RD.shape[0], w_END.shape[1])
        start = 0
        for expert, count in enumerate(torch.bincount(expert_R, minlength=num_experts)[:num_experts].tolist()):
            if count:
                out_RN[start : start + count] = linear(x_RD[start : start + count], w_END[expert])
                start += count
    if bias_EN is not None:
        out_RN = (out_RN + bias_EN[expert_R.clamp(max=num_experts - 1)]).to(x_RD.dtype)
    return out_RN if factors is None else out_RN + products(x_RD, factors, index_R)
