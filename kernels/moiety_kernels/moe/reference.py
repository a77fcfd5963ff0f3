"""Definition of an expert layer after routing: gather → gate and up → activation → down → weight → combine.

T tokens, K experts per token, E experts, D model width, F expert width. No capacity limit, no dropped token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from moiety_kernels.linear.reference import linear
from moiety_kernels.moe.activation import SILU
from moiety_kernels.route.reference import group_by_expert

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.moe.activation import Activation
    from moiety_kernels.quantization.weight import QuantizedWeight


def activate(gate_up_R2F: Tensor, activation: Activation = SILU) -> Tensor:
    """Return the activation of the gate, the first half of the last dimension, and up, the second half.

    Without a gate all values are up's.
    """
    if not activation.gated:
        return functional.relu(gate_up_R2F).square()
    gate, up = gate_up_R2F.chunk(2, dim=-1)
    if activation.kind == "silu":
        return functional.silu(gate) * up
    if activation.kind == "scaled_silu":
        return functional.silu(activation.alpha * gate) * up
    if activation.kind == "gelu_tanh":
        return functional.gelu(gate, approximate="tanh") * up
    gate = gate.clamp(max=activation.limit)
    up = up.clamp(-activation.limit, activation.limit)
    if activation.kind == "limited_silu":
        return functional.silu(gate) * up
    return (up + 1) * (gate * torch.sigmoid(gate * activation.alpha))


def experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Tensor | QuantizedWeight,
    w_down_EDF: Tensor | QuantizedWeight,
    *,
    activation: Activation = SILU,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token, summed in the order of k, so that the result is deterministic.

    A negative number stands for an expert on another rank and adds nothing.
    """
    num_tokens, top_k = expert_TK.shape
    order_R, counts_E = group_by_expert(expert_TK, w_down_EDF.shape[0])
    y_RD = x_TD.new_zeros(num_tokens * top_k, x_TD.shape[1])
    start = 0
    for expert, count in enumerate(counts_E.tolist()):
        if count:
            pairs = order_R[start : start + count]
            up_bias = None if gate_up_bias_E2F is None else gate_up_bias_E2F[expert]
            down_bias = None if down_bias_ED is None else down_bias_ED[expert]
            inner = activate(linear(x_TD[pairs // top_k], w_gate_up_E2FD[expert], up_bias), activation)
            y_RD[pairs] = linear(inner, w_down_EDF[expert], down_bias)
            start += count
    y_TKD = y_RD.view(num_tokens, top_k, -1) * weight_TK.unsqueeze(-1).to(x_TD.dtype)
    return torch.sum(y_TKD, dim=1)
