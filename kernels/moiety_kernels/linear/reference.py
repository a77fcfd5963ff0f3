"""Definition of a linear map. T tokens, D input width, N output width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

from moiety_kernels.quantization import QuantizedWeight, dequantize

if TYPE_CHECKING:
    from torch import Tensor


def linear(x_TD: Tensor, weight_ND: Tensor | QuantizedWeight, bias_N: Tensor | None = None) -> Tensor:
    """Return x · weightᵀ + bias in x's dtype; a weight of another dtype is widened or rounded to it first."""
    if isinstance(weight_ND, QuantizedWeight):
        weight_ND = dequantize(weight_ND)
    bias = None if bias_N is None else bias_N.to(x_TD.dtype)
    return functional.linear(x_TD, weight_ND.to(x_TD.dtype), bias)
