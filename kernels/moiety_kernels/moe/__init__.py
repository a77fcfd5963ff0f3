"""The feed-forward products: the experts of a mixture layer, and the one expert of a dense layer."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.checks import KernelInputError, require, require_shape
from moiety_kernels.linear import linear
from moiety_kernels.moe import grouped, reference
from moiety_kernels.moe.activation import GELU_TANH, SILU, Activation
from moiety_kernels.moe.choice import MOE_KERNELS, unavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType

    from torch import Tensor

__all__ = ["GELU_TANH", "MOE_KERNELS", "SILU", "Activation", "dense_glu", "experts", "unavailable"]


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.moe import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


@functools.cache
def _triton() -> ModuleType:
    from moiety_kernels.grouped_gemm import kernel  # noqa: PLC0415 - Triton, which a CPU has no use for

    return kernel


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
    kernel: str = "auto",
    invariant: bool = False,
) -> Tensor:
    """Σ_k weight · expert(x) for each token; deterministic, no capacity limit, no dropped token. Of the rows of
    w_gate_up the first half are the gate's, the second the up's; so are the biases', which are float32.

    `kernel` is who computes it: "auto" takes the fastest that takes these tensors; another that does not is an error.
    With `invariant`, a token's bits do not depend on what other tokens are there; on a GPU only Triton's can do that.
    """
    num_experts, width, hidden = w_down_EDF.shape
    require_shape("w_gate_up", w_gate_up_E2FD, (num_experts, 2 * hidden, width))
    require_shape("x", x_TD, (expert_TK.shape[0], width))
    require(weight_TK.shape == expert_TK.shape, "weight and expert must have one shape")
    require(kernel in MOE_KERNELS, "kernel must be auto, triton, grouped or reference")
    biases = gate_up_bias_E2F, down_bias_ED
    if gate_up_bias_E2F is not None:
        require_shape("gate_up_bias", gate_up_bias_E2F, (num_experts, 2 * hidden))
    if down_bias_ED is not None:
        require_shape("down_bias", down_bias_ED, (num_experts, width))
    inputs = x_TD, weight_TK, expert_TK, w_gate_up_E2FD, w_down_EDF
    if kernel == "auto" and x_TD.is_cpu and _cpu().fits(x_TD, expert_TK, w_gate_up_E2FD, w_down_EDF, *biases):
        fast: Tensor = _cpu().experts(*inputs, activation, *biases)
        return fast
    compute = _implementation(kernel, x_TD, expert_TK, w_gate_up_E2FD, w_down_EDF)
    if invariant:
        require(_is_triton(compute), "invariant results need the Triton kernels, which do not compute this")
        compute = functools.partial(compute, invariant=True)
    return compute(*inputs, activation=activation, gate_up_bias_E2F=biases[0], down_bias_ED=biases[1])


def _is_triton(compute: Callable[..., Tensor]) -> bool:
    return compute not in (grouped.experts, reference.experts)


def _implementation(
    kernel: str, x_TD: Tensor, expert_TK: Tensor, w_gate_up_E2FD: Tensor, w_down_EDF: Tensor
) -> Callable[..., Tensor]:
    """`kernel`'s, or of "auto" the first that takes these tensors."""
    if kernel == "triton" or (kernel == "auto" and x_TD.is_cuda):
        reason = unavailable("triton", x_TD.device, x_TD.dtype)
        reason = reason or _triton().unfit(x_TD, expert_TK, w_gate_up_E2FD, w_down_EDF)
        if reason is None:
            found: Callable[..., Tensor] = _triton().experts
            return found
        if kernel == "triton":
            raise KernelInputError(f"the Triton kernels do not take this: {reason}; ask for another or for auto")
    if kernel == "grouped" or (kernel == "auto" and x_TD.is_cuda):
        if grouped.fits(x_TD, w_down_EDF):
            return grouped.experts
        if kernel == "grouped":
            raise KernelInputError("torch's grouped product takes bfloat16 in rows of whole 16 bytes; ask for auto")
    return reference.experts


def dense_glu(
    x_TD: Tensor,
    w_gate_up_2FD: Tensor,
    w_down_DF: Tensor,
    gate_up_bias_2F: Tensor | None = None,
    down_bias_D: Tensor | None = None,
    *,
    activation: Activation = SILU,
    weight_T1: Tensor | None = None,
    onto_TD: Tensor | None = None,
) -> Tensor:
    """down(act(gate(x), up(x))), the feed-forward of a layer without experts, and of experts that serve every token:
    times `weight`, float32, and added to `onto`, where they are given; `onto` may be overwritten."""
    biases = gate_up_bias_2F, down_bias_D
    if weight_T1 is not None:
        require_shape("weight", weight_T1, (x_TD.shape[0], 1))
    if onto_TD is not None:
        require_shape("onto", onto_TD, (x_TD.shape[0], w_down_DF.shape[0]))
    if x_TD.is_cpu and (onto_TD is None or onto_TD.is_contiguous()):
        as_experts = w_gate_up_2FD.view(1, *w_gate_up_2FD.shape), w_down_DF.view(1, *w_down_DF.shape)
        if _cpu().fits(x_TD, None, *as_experts, *biases):
            fast: Tensor = _cpu().experts(x_TD, weight_T1, None, *as_experts, activation, *biases, onto_TD)
            return fast
    out_TD = linear(
        reference.activate(linear(x_TD, w_gate_up_2FD, gate_up_bias_2F), activation), w_down_DF, down_bias_D
    )
    if weight_T1 is not None:
        out_TD = out_TD * weight_T1.to(x_TD.dtype)
    return out_TD if onto_TD is None else onto_TD + out_TD
