"""The sum of two tensors of rows, as a job of ours: on a CPU torch's own would stand between those of a decode step."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from moiety_kernels.add import reference
from moiety_kernels.checks import require

if TYPE_CHECKING:
    from types import ModuleType

    from torch import Tensor


@functools.cache
def _cpu() -> ModuleType:
    from moiety_kernels.add import cpu  # noqa: PLC0415 - numba, which a GPU has no use for

    return cpu


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """x + y. The first may be overwritten; do not read it afterwards."""
    require(x_TD.shape == y_TD.shape, "x and y must have one shape")
    if x_TD.is_cpu and _cpu().fits(x_TD) and _cpu().fits(y_TD):
        fast: Tensor = _cpu().add(x_TD, y_TD)
        return fast
    return reference.add(x_TD, y_TD)
