"""Feed-forward products: the experts of a mixture layer, and the single expert of a dense layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from moiety_kernels.checks import require, require_shape
from moiety_kernels.input_order import gather_expert_inputs
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.linear import linear
from moiety_kernels.low_rank import FeedForwardFactors, add_low_rank
from moiety_kernels.moe import adapted, grouped, reference
from moiety_kernels.moe.activation import GELU_TANH, RELU2, SILU, Activation
from moiety_kernels.moe.choice import MOE_KERNELS, unavailable

if TYPE_CHECKING:
    from moiety_kernels.quantization import Weight

__all__ = ["GELU_TANH", "MOE_KERNELS", "RELU2", "SILU", "Activation", "dense_glu", "experts", "unavailable"]


_cpu = lazy_import(__name__, "cpu")
_triton = lazy_import("moiety_kernels.grouped_gemm", "kernel")


def experts(
    x_TD: Tensor,
    weight_TK: Tensor,
    expert_TK: Tensor,
    w_gate_up_E2FD: Weight,
    w_down_EDF: Weight,
    *,
    activation: Activation = SILU,
    gate_up_bias_E2F: Tensor | None = None,
    down_bias_ED: Tensor | None = None,
    kernel: str = "auto",
    invariant: bool = False,
    adapters: FeedForwardFactors | None = None,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token; deterministic, no capacity limit, no dropped token.

    The first half of w_gate_up's rows is the gate's, the second the up's; the same holds for the biases, which are
    float32. With an activation without a gate, both have the rows of up only. A negative number in `expert` stands for
    an expert on another rank: it costs nothing here and adds nothing.

    `kernel` names the implementation: "auto" chooses the fastest that supports these tensors; a named one that does not
    is an error. With `invariant`, a token's bits do not depend on the other tokens; on a GPU only Triton supports that.
    `adapters` are added to the experts' products; on a GPU torch then computes the layer, whatever `kernel` is chosen.
    """
    num_experts, width, hidden = w_down_EDF.shape
    num_ups = activation.num_inputs * hidden
    require(
        w_gate_up_E2FD.shape == (num_experts, num_ups, width),
        "w_gate_up must be [E, 2F, D], or [E, F, D] without gates, as w_down [E, D, F]",
    )
    require_shape("x", x_TD, (expert_TK.shape[0], width))
    require(weight_TK.shape == expert_TK.shape, "weight and expert must have one shape")
    require(kernel in MOE_KERNELS, "kernel must be auto, triton, grouped or reference")
    biases = gate_up_bias_E2F, down_bias_ED
    if gate_up_bias_E2F is not None:
        require_shape("gate_up_bias", gate_up_bias_E2F, (num_experts, num_ups))
    if down_bias_ED is not None:
        require_shape("down_bias", down_bias_ED, (num_experts, width))
    routed, up, down = (x_TD, weight_TK, expert_TK), w_gate_up_E2FD, w_down_EDF
    if kernel == "auto" and x_TD.is_cpu and _cpu().fits(x_TD, expert_TK, up, down, *biases, adapters):
        fast: Tensor = _cpu().experts(*routed, up, down, activation, *biases, adapters=adapters)
        return fast
    if adapters is not None:
        require(not invariant, "invariant results with adapters need the kernels for a CPU, which do not take this")
        return adapted.experts(*routed, up, down, activation, *biases, adapters)
    options: dict[str, Any] = {"activation": activation, "gate_up_bias_E2F": biases[0], "down_bias_ED": biases[1]}
    if kernel == "triton" or (kernel == "auto" and x_TD.is_cuda):
        on_gpu = _by_triton(*routed, up, down, **options, invariant=invariant)
        if isinstance(on_gpu, Tensor):
            return on_gpu
        require(kernel == "auto", f"the Triton kernels do not take this: {on_gpu}; ask for another or for auto")
    require(not invariant, "invariant results need the Triton kernels, which do not compute this")
    if kernel == "grouped" or (kernel == "auto" and x_TD.is_cuda):
        if isinstance(up, Tensor) and isinstance(down, Tensor) and grouped.fits(x_TD, down):
            return grouped.experts(*routed, up, down, **options)
        require(kernel == "auto", "torch's grouped product takes bfloat16 in rows of whole 16 bytes; ask for auto")
    return reference.experts(*routed, up, down, **options)


def _by_triton(
    x_TD: Tensor, weight_TK: Tensor, expert_TK: Tensor, up: Weight, down: Weight, **options: Any
) -> Tensor | str:
    """Return the result, or why the Triton kernels do not support the tensors."""
    reason = unfit_for_triton(x_TD, expert_TK, up, down)
    if reason is not None:
        return reason
    (up_values, up_scale), (down_values, down_scale) = _values_and_scales(up), _values_and_scales(down)
    options |= {"gate_up_scale": up_scale, "down_scale": down_scale}
    if not isinstance(down, Tensor):
        options["down_order_EF"] = down.order_K
        if down.format.bits == 4:
            options["four"] = "mxfp4" if down.format.floating else "int4"
    if isinstance(up, Tensor) or up.order_K is None:
        computed: Tensor = _triton().experts(x_TD, weight_TK, expert_TK, up_values, down_values, **options)
        return computed
    expert_R = expert_TK.flatten()
    x_RD = gather_expert_inputs(x_TD.repeat_interleave(expert_TK.shape[1], dim=0), up.order_K, expert_R)
    pairs = weight_TK.reshape(-1, 1), expert_R.unsqueeze(1)
    weighted_RD = _triton().experts(x_RD, *pairs, up_values, down_values, **options)
    summed: Tensor = _triton().combine(weighted_RD, expert_TK.contiguous())
    return summed


def unfit_for_triton(x_TD: Tensor, expert_TK: Tensor, up: Weight, down: Weight) -> str | None:
    """Return why the Triton kernels do not support these tensors; None if they do."""
    (up_values, up_scale), (down_values, down_scale) = _values_and_scales(up), _values_and_scales(down)
    forms = {None if isinstance(weight, Tensor) else weight.format for weight in (up, down)}
    if len(forms) > 1:
        return "the two weights are kept in different ways"
    (form,) = forms
    reason: str | None = unavailable("triton", x_TD.device, x_TD.dtype, form)
    return reason or _triton().unfit(x_TD, expert_TK, up_values, down_values, up_scale, down_scale)


def _values_and_scales(weight: Weight) -> tuple[Tensor, Tensor | None]:
    """Return values and scales for the Triton kernels: scales of rows without the dimension of groups."""
    if isinstance(weight, Tensor):
        return weight, None
    scales = weight.scales_NG
    return weight.values_NK, scales.squeeze(-1) if weight.format.group is None else scales


def dense_glu(
    x_TD: Tensor,
    w_gate_up_2FD: Weight,
    w_down_DF: Weight,
    gate_up_bias_2F: Tensor | None = None,
    down_bias_D: Tensor | None = None,
    *,
    activation: Activation = SILU,
    weight_T1: Tensor | None = None,
    onto_TD: Tensor | None = None,
    invariant: bool = False,
    adapters: FeedForwardFactors | None = None,
) -> Tensor:
    """Return down(act(gate(x), up(x))), the feed-forward of a layer without experts, or of shared experts.

    With an activation without a gate, `w_gate_up` has the rows of up only.

    The result is multiplied by `weight`, float32, and added to `onto`, where they are given; `onto` may be overwritten.
    `invariant` as in `linear`. `adapters` are added to both products.
    """
    biases = gate_up_bias_2F, down_bias_D
    if weight_T1 is not None:
        require_shape("weight", weight_T1, (x_TD.shape[0], 1))
    if onto_TD is not None:
        require_shape("onto", onto_TD, (x_TD.shape[0], w_down_DF.shape[0]))
    is_padded = w_down_DF.shape[1] * activation.num_inputs != w_gate_up_2FD.shape[0]  # its order has places for zeros
    if x_TD.is_cpu and not is_padded and (onto_TD is None or onto_TD.is_contiguous()):
        as_experts = w_gate_up_2FD.unsqueeze(0), w_down_DF.unsqueeze(0)
        if _cpu().fits(x_TD, None, *as_experts, *biases, adapters):
            fast: Tensor = _cpu().experts(x_TD, weight_T1, None, *as_experts, activation, *biases, onto_TD, adapters)
            return fast
    gate_up_T2F = linear(x_TD, w_gate_up_2FD, gate_up_bias_2F, invariant=invariant)
    if adapters is not None and adapters.gate_up is not None:
        add_low_rank(gate_up_T2F, x_TD, adapters.gate_up, adapters.slot_T)
    inner_TF = reference.activate(gate_up_T2F, activation)
    out_TD = linear(inner_TF, w_down_DF, down_bias_D, invariant=invariant)
    if adapters is not None and adapters.down is not None:
        add_low_rank(out_TD, inner_TF, adapters.down, adapters.slot_T)
    if weight_T1 is not None:
        out_TD = out_TD * weight_T1.to(x_TD.dtype)
    return out_TD if onto_TD is None else onto_TD + out_TD
