"""Definition of a linear map of each row by the matrix of its own expert. R rows, D inputs, N outputs, E experts."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def routed_linear(x_RD: Tensor, weight_END: Tensor, expert_R: Tensor) -> Tensor:
    """Return weight[expert] · x for each row, [R, N]."""
    return torch.einsum("rd,rnd->rn", x_RD, weight_END[expert_R.long()].to(x_RD.dtype))
