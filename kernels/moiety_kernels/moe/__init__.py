"""The feed-forward products: the experts of a mixture layer, and the one expert of a dense layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.linear import linear
from moiety_kernels.moe import grouped, reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.moe import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


def experts(x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, w_gate_up_E2FD: Tensor, w_down_EDF: Tensor) -> Tensor:
    """Σ_k weight · expert(x) for each token; deterministic, no capacity limit, no dropped token."""
    num_experts, width, hidden = w_down_EDF.shape
    require_shape("w_gate_up", w_gate_up_E2FD, (num_experts, 2 * hidden, width))
    require_shape("x", x_TD, (expert_TK.shape[0], width))
    require(weight_TK.shape == expert_TK.shape, "weight and expert must have one shape")
    if x_TD.is_cuda and grouped.fits(x_TD, w_down_EDF):
        return grouped.experts(x_TD, weight_TK, expert_TK, w_gate_up_E2FD, w_down_EDF)
    if x_TD.is_cpu and _cpu().fits(x_TD, expert_TK, w_gate_up_E2FD, w_down_EDF):
        fast: Tensor = _cpu().experts(x_TD, weight_TK, expert_TK, w_gate_up_E2FD, w_down_EDF)
        return fast
    return reference.experts(x_TD, weight_TK, expert_TK, w_gate_up_E2FD, w_down_EDF)


def dense_swiglu(
    x_TD: Tensor,
    w_gate_up_2FD: Tensor,
    w_down_DF: Tensor,
    gate_up_bias_2F: Tensor | None = None,
    down_bias_D: Tensor | None = None,
) -> Tensor:
    """down(silu(gate(x)) · up(x)), the feed-forward of a layer without experts."""
    return linear(reference.swiglu(linear(x_TD, w_gate_up_2FD, gate_up_bias_2F)), w_down_DF, down_bias_D)
