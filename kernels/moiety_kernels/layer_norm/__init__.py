"""Layer normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.layer_norm import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

_cpu = lazy_import(__name__, "cpu")


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) · weight + bias over the last dimension.

    It is computed in float32 and returned in x's dtype.
    """
    require_shape("weight", weight_D, (x_TD.shape[-1],))
    require_shape("bias", bias_D, (x_TD.shape[-1],))
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_D, bias_D):
        fast: Tensor = _cpu().layer_norm(x_TD, weight_D, bias_D, eps)
        return fast
    return reference.layer_norm(x_TD, weight_D, bias_D, eps)


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, layer_norm(x + delta)). Both inputs may be overwritten; do not read them afterwards."""
    require(x_TD.shape == delta_TD.shape, "x and delta must have one shape")
    if x_TD.is_cpu and all(_cpu().fits(one, weight_D, bias_D) for one in (x_TD, delta_TD)):
        fast: tuple[Tensor, Tensor] = _cpu().add_layer_norm(x_TD, delta_TD, weight_D, bias_D, eps)
        return fast
    total_TD = x_TD + delta_TD
    return total_TD, layer_norm(total_TD, weight_D, bias_D, eps)
