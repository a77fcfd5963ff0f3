"""Definition of a linear map per head. T tokens, H heads, K input width, N output width."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor


def head_linear(x_THK: Tensor, weight_HNK: Tensor) -> Tensor:
    """Return out_THN, contiguous, in x's dtype; a weight of another dtype is widened or rounded to it first."""
    out_HTN = torch.bmm(x_THK.transpose(0, 1), weight_HNK.to(x_THK.dtype).transpose(1, 2))
    return out_HTN.transpose(0, 1).contiguous()
