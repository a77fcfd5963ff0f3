"""Definition of the embedding lookup, in torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def embedding(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype, factor: float = 1.0) -> Tensor:
    rows_TD = functional.embedding(token_ids_T, table_VD).to(dtype)
    return rows_TD if factor == 1.0 else rows_TD * factor
