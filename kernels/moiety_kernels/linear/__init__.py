"""A linear map whose weight may be narrower than its input: bfloat16 weights under float32 activations on a CPU."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require_shape
from moiety_kernels.cpu.capability import NATIVE_BFLOAT16_ROWS, native_bfloat16
from moiety_kernels.linear import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.linear import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


def prefers_native(weight: Tensor) -> bool:
    """Whether many rows are better multiplied with this weight by the processor's own bfloat16 product."""
    return weight.dtype is torch.bfloat16 and native_bfloat16()


def linear(x_TD: Tensor, weight_ND: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """x · weightᵀ + bias, in x's dtype. Many float32 rows may be rounded to a bfloat16 weight's dtype first, where the
    processor is made for that."""
    require_shape("weight", weight_ND, (-1, x_TD.shape[-1]))
    if x_TD.is_cpu and x_TD.shape[0] >= NATIVE_BFLOAT16_ROWS and prefers_native(weight_ND):
        return reference.linear(x_TD.bfloat16(), weight_ND, bias_N).to(x_TD.dtype)
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_ND):
        fast: Tensor = _cpu().linear(x_TD, weight_ND, bias_N)
        return fast
    return reference.linear(x_TD, weight_ND, bias_N)
