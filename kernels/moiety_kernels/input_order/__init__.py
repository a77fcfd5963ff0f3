"""Gather of a product's inputs in the order of its quantized weight. T tokens, R rows, K inputs, E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import KernelInputError, require_shape
from moiety_kernels.input_order import reference
from moiety_kernels.input_order.reference import gather_expert_inputs
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["gather_expert_inputs", "gather_inputs"]

_cpu = lazy_import(__name__, "cpu")


def gather_inputs(x_TK: Tensor, order_K: Tensor) -> Tensor:
    """Return x[:, order], contiguous. `order`: int32, each input once, and -1, any number of times, for zeros."""
    require_shape("order", order_K, (-1,))
    if len(order_K) < x_TK.shape[-1]:
        raise KernelInputError(f"an order of {len(order_K)} inputs is too short for rows of {x_TK.shape[-1]}")
    if x_TK.is_cpu and _cpu().fits(x_TK, order_K):
        fast: Tensor = _cpu().gather_inputs(x_TK, order_K)
        return fast
    return reference.gather_inputs(x_TK, order_K)
