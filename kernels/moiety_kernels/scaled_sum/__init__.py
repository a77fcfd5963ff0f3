"""Sums of scaled tensors, and rows with a factor each: what residual connections and gates of inputs need.

torch computes the same. On a CPU these are jobs of the team, so that steps with them can be recorded and replayed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import require
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.scaled_sum import reference

if TYPE_CHECKING:
    from torch import Tensor

_cpu = lazy_import(__name__, "cpu")


def scaled_sum(x: Tensor, factor: float = 1.0, y: Tensor | None = None, y_factor: float = 1.0) -> Tensor:
    """Return factor · x + y_factor · y, of x's shape and dtype; without y only factor · x."""
    require(y is None or (y.shape == x.shape and y.dtype is x.dtype), "x and y must have one shape and dtype")
    if x.is_cpu and _cpu().fits(*((x,) if y is None else (x, y))):
        fast: Tensor = _cpu().scaled_sum(x, factor, y, y_factor)
        return fast
    return reference.scaled_sum(x, factor, y, y_factor)


def scale_rows(x_T: Tensor, factor_F: Tensor, row_T: Tensor | None = None) -> Tensor:
    """Return each of T rows, of any shape, times its factor, in x's dtype.

    `factor_F`, float32: a table in which `row_T`, int64 or int32, has the place of each row's factor; without `row_T`
    the factors are in the order of the rows.
    """
    require(row_T is not None or factor_F.numel() == x_T.shape[0], "each row has a factor")
    require(row_T is None or row_T.shape[0] == x_T.shape[0], "each row has a place in the table")
    require(factor_F.dtype is torch.float32, "factors must be float32")
    if x_T.is_cpu and _cpu().fits_rows(x_T, factor_F, row_T):
        fast: Tensor = _cpu().scale_rows(x_T, factor_F, row_T)
        return fast
    return reference.scale_rows(x_T, factor_F, row_T)
