"""Linear map with a separate weight per head, as latent attention uses to enter and leave the latent space."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import KernelInputError, require_shape
from moiety_kernels.head_linear import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    from torch import Tensor


_cpu = lazy_import(__name__, "cpu")
_kernel = lazy_import("moiety_kernels.linear", "kernel")


def head_linear(x_THK: Tensor, weight_HNK: Tensor, *, invariant: bool = False) -> Tensor:
    """Return out_THN = Σ_k x[t, h, k] · weight[h, n, k], contiguous, in x's dtype.

    It is as exact and as invariant as `linear`.
    """
    require_shape("weight", weight_HNK, (x_THK.shape[1], -1, x_THK.shape[2]))
    if x_THK.is_cpu and _cpu().fits(x_THK, weight_HNK, x_THK.shape[2]):
        fast: Tensor = _cpu().head_linear(x_THK, weight_HNK)
        return fast
    if not invariant:
        return reference.head_linear(x_THK, weight_HNK)
    if x_THK.is_cpu:
        raise KernelInputError(
            f"invariant results on a CPU need float32 heads of 16, 32 … values, not {x_THK.dtype} of {x_THK.shape[2]}"
        )
    reason = _kernel().unfit(x_THK, weight_HNK)
    if reason is not None:
        raise KernelInputError(f"invariant results need the Triton kernel, which does not take this: {reason}")
    on_gpu: Tensor = _kernel().head_linear(x_THK, weight_HNK)
    return on_gpu
