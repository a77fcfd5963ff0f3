"""Definition of sums of scaled tensors, and of rows with a factor each. T rows, F factors."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def scaled_sum(x: Tensor, factor: float, y: Tensor | None, y_factor: float) -> Tensor:
    """Return factor · x + y_factor · y."""
    scaled = x * factor
    return scaled if y is None else scaled + y * y_factor


def scale_rows(x_T: Tensor, factor_F: Tensor, row_T: Tensor | None) -> Tensor:
    """Return each row of x times its factor."""
    factor_T = factor_F if row_T is None else factor_F.index_select(0, row_T)
    return x_T * factor_T.to(x_T.dtype).view(-1, *[1] * (x_T.dim() - 1))
