"""Embedding lookup: rows of a table by token id."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require_shape
from moiety_kernels.embedding import reference
from moiety_kernels.lazy_imports import lazy_import

if TYPE_CHECKING:
    import torch
    from torch import Tensor

_cpu = lazy_import(__name__, "cpu")


def embedding(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    """Return row token_ids_T[t], int64, of the table for each t, times `factor`, in `dtype`.

    On a CPU, an id outside the table gives a row of NaN, so that only its request fails. The result for one on a GPU is
    undefined.
    """
    require_shape("table", table_VD, (-1, -1))
    if table_VD.is_cpu and _cpu().fits(token_ids_T, table_VD, dtype):
        rows: Tensor = _cpu().embedding(token_ids_T, table_VD, factor)
        return rows
    return reference.embedding(token_ids_T, table_VD, dtype, factor)
