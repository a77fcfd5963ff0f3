"""Rotary position embedding by tables of cosines and sines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require, require_shape
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.rope import reference

if TYPE_CHECKING:
    from torch import Tensor


_kernel = lazy_import("moiety_kernels.attention_input", "kernel")


def rope(x_THd: Tensor, cos_PR: Tensor, sin_PR: Tensor, positions_T: Tensor) -> Tensor:
    """Rotate the pairs (i, i + R) of each head by the angles of the token's position; the rest is unchanged."""
    require_shape("positions", positions_T, (x_THd.shape[0],))
    require(2 * cos_PR.shape[1] <= x_THd.shape[-1], "the rotated width is larger than the head width")
    if x_THd.is_cuda and _kernel().fits(x_THd, cos_PR):
        on_gpu: Tensor = _kernel().rope(x_THd, cos_PR, sin_PR, positions_T)
        return on_gpu
    return reference.rope(x_THd, cos_PR, sin_PR, positions_T)
