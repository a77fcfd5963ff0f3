"""A linear map of its own for each head, as latent attention goes in and out of the latent space."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.checks import require_shape
from moiety_kernels.head_linear import reference

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.head_linear import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


def head_linear(x_THK: Tensor, weight_HNK: Tensor) -> Tensor:
    """out_THN = Σ_k x[t, h, k] · weight[h, n, k], contiguous, in x's dtype; as exact as `linear`."""
    require_shape("weight", weight_HNK, (x_THK.shape[1], -1, x_THK.shape[2]))
    if x_THK.is_cpu and _cpu().fits(x_THK, weight_HNK, x_THK.shape[2]):
        fast: Tensor = _cpu().head_linear(x_THK, weight_HNK)
        return fast
    return reference.head_linear(x_THK, weight_HNK)
