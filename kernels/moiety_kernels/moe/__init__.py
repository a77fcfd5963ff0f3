"""The feed-forward products: the experts of a mixture layer, and the one expert of a dense layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.linear import linear
from moiety_kernels.moe import grouped, reference
from moiety_kernels.moe.activation import GELU_TANH, SILU, Activation

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

__all__ = ["GELU_TANH", "SILU", "Activation", "dense_glu", "experts"]


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.moe import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


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
    """Σ_k weight · expert(x) for each token; deterministic, no capacity limit, no dropped token. Of the rows of
    w_gate_up the first half are the gate's, the second the up's; so are the biases', which are float32."""
    num_experts, width, hidden = w_down_EDF.shape
    require_shape("w_gate_up", w_gate_up_E2FD, (num_experts, 2 * hidden, width))
    require_shape("x", x_TD, (expert_TK.shape[0], width))
    require(weight_TK.shape == expert_TK.shape, "weight and expert must have one shape")
    biases = gate_up_bias_E2F, down_bias_ED
    if gate_up_bias_E2F is not None:
        require_shape("gate_up_bias", gate_up_bias_E2F, (num_experts, 2 * hidden))
    if down_bias_ED is not None:
        require_shape("down_bias", down_bias_ED, (num_experts, width))
    inputs = x_TD, weight_TK, expert_TK, w_gate_up_E2FD, w_down_EDF
    if x_TD.is_cpu and _cpu().fits(x_TD, expert_TK, w_gate_up_E2FD, w_down_EDF, *biases):
        fast: Tensor = _cpu().experts(*inputs, activation, *biases)
        return fast
    on_gpu = x_TD.is_cuda and grouped.fits(x_TD, w_down_EDF)
    compute = grouped.experts if on_gpu else reference.experts
    return compute(*inputs, activation=activation, gate_up_bias_E2F=biases[0], down_bias_ED=biases[1])


def dense_glu(
    x_TD: Tensor,
    w_gate_up_2FD: Tensor,
    w_down_DF: Tensor,
    gate_up_bias_2F: Tensor | None = None,
    down_bias_D: Tensor | None = None,
    *,
    activation: Activation = SILU,
) -> Tensor:
    """down(act(gate(x), up(x))), the feed-forward of a layer without experts, and of experts that serve every token."""
    inner = reference.activate(linear(x_TD, w_gate_up_2FD, gate_up_bias_2F), activation)
    return linear(inner, w_down_DF, down_bias_D)
