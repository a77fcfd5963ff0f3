"""A linear map whose weight may be narrower than its input: bfloat16 weights under float32 activations on a CPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.checks import require_shape
from moiety_kernels.linear import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor

    from moiety_kernels.quantization.weight import QuantizedWeight


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.linear import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


def linear(x_TD: Tensor, weight_ND: Tensor | QuantizedWeight, bias_N: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, in x's dtype. Where the processor has matrix tiles, float32 rows are rounded to a bfloat16
    weight's dtype first, and what is too small for a normal number counts as zero; products and sums are float32."""
    require_shape("weight", weight_ND, (-1, x_TD.shape[-1]))
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_ND):
        fast: Tensor = _cpu().linear(x_TD, weight_ND, bias_N)
        return fast
    return reference.linear(x_TD, weight_ND, bias_N)
