"""Linear map whose weight may be narrower than its input, as with bfloat16 weights and float32 rows on a CPU."""

from __future__ import annotations

from torch import Tensor

from moiety_kernels.checks import KernelInputError, require_shape
from moiety_kernels.input_order import gather_inputs
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.linear import reference
from moiety_kernels.quantization import QuantizedWeight, dequantize

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def linear(
    x_TD: Tensor, weight_ND: Tensor | QuantizedWeight, bias_N: Tensor | None = None, *, invariant: bool = False
) -> Tensor:
    """Return x · weightᵀ + bias, in x's dtype.

    On a CPU with matrix tiles, float32 rows are rounded to a bfloat16 weight's dtype first, and subnormal numbers count
    as zero; products and sums are float32. With `invariant`, a row's bits do not depend on the other rows; where that
    is not possible it is an error.
    """
    if isinstance(weight_ND, QuantizedWeight) and weight_ND.order_K is not None:
        x_TD, weight_ND = gather_inputs(x_TD, weight_ND.order_K), weight_ND.in_stored_order()
    require_shape("weight", weight_ND, (-1, x_TD.shape[-1]))
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_ND):
        fast: Tensor = _cpu().linear(x_TD, weight_ND, bias_N)
        return fast
    if not invariant and not (isinstance(weight_ND, QuantizedWeight) and x_TD.is_cuda):
        return reference.linear(x_TD, weight_ND, bias_N)
    if x_TD.is_cpu:
        raise KernelInputError(
            f"invariant results on a CPU need float32 rows of 16, 32, 48 … values, not {x_TD.dtype} of {x_TD.shape[-1]}"
        )
    if isinstance(weight_ND, QuantizedWeight) and _kernel().unfit_narrow(x_TD, weight_ND) is not None:
        if not invariant:
            return reference.linear(x_TD, weight_ND, bias_N)
        weight_ND = dequantize(weight_ND)
    if isinstance(weight_ND, Tensor):
        reason = _kernel().unfit(x_TD.unsqueeze(1), weight_ND.unsqueeze(0))
        if reason is not None:
            raise KernelInputError(f"invariant results need the Triton kernel, which does not take this: {reason}")
    on_gpu: Tensor = _kernel().linear(x_TD, weight_ND, bias_N)
    return on_gpu
