"""RMS normalisation of each head's or group's output of a recurrent layer, with a gate from the layer's input."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from moiety_kernels.checks import require, require_shape
from moiety_kernels.gated_norm import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor

Gate = Literal["silu", "sigmoid", "silu_first"]

_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import(__name__, "kernel")


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_MV: Tensor, eps: float, gate: Gate = "silu") -> Tensor:
    """Return rms_norm(x) · weight · gate(z) over the last dimension, computed in float32, in x's dtype.

    z is `gate_TMV`. `weight_MV` may have one row for all heads. The gate "silu_first" is Mamba-2's:
    rms_norm(x · silu(z)) · weight.
    """
    require_shape("gate", gate_TMV, tuple(x_TMV.shape))
    require_shape("weight", weight_MV, (-1, x_TMV.shape[2]))
    require(weight_MV.shape[0] in (1, x_TMV.shape[1]), "weight must have one row, or one a head")
    require(gate in ("silu", "sigmoid", "silu_first"), "gate must be silu, sigmoid or silu_first")
    if x_TMV.is_cpu and _cpu().fits(x_TMV, gate_TMV, weight_MV):
        fast: Tensor = _cpu().gated_norm(x_TMV, gate_TMV, weight_MV, eps, gate)
        return fast
    if x_TMV.is_cuda and _kernel().fits(x_TMV, gate_TMV):
        on_gpu: Tensor = _kernel().gated_norm(x_TMV, gate_TMV, weight_MV, eps, gate)
        return on_gpu
    return reference.gated_norm(x_TMV, gate_TMV, weight_MV, eps, gate)
