"""RMS normalisation, alone and fused with the residual addition before it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.rms_norm import reference

if TYPE_CHECKING:
    from torch import Tensor


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight over the last dimension, computed in float32, in x's dtype."""
    require_shape("weight", weight_D, (x_TD.shape[-1],))
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_D):
        fast: Tensor = _cpu().rms_norm(x_TD, weight_D, eps)
        return fast
    if x_TD.is_cuda and _kernel().fits(x_TD):
        on_gpu: Tensor = _kernel().rms_norm(x_TD, weight_D, eps)
        return on_gpu
    return reference.rms_norm(x_TD, weight_D, eps)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta)). Both inputs may be overwritten; do not read them afterwards."""
    require_shape("weight", weight_D, (x_TD.shape[-1],))
    require(x_TD.shape == delta_TD.shape, "x and delta must have one shape")
    if x_TD.is_cpu and _cpu().fits(x_TD, weight_D, delta_TD):
        fast: tuple[Tensor, Tensor] = _cpu().add_rms_norm(x_TD, delta_TD, weight_D, eps)
        return fast
    if x_TD.is_cuda and _kernel().fits(x_TD) and _kernel().fits(delta_TD):
        on_gpu: tuple[Tensor, Tensor] = _kernel().add_rms_norm(x_TD, delta_TD, weight_D, eps)
        return on_gpu
    return reference.add_rms_norm(x_TD, delta_TD, weight_D, eps)
