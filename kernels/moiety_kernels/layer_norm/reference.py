"""Definition of layer normalisation (Ba et al. 2016). T tokens, D width."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return (x - mean(x)) / sqrt(variance(x) + eps) · weight + bias, computed in float32, in x's dtype."""
    return functional.layer_norm(x_TD.float(), weight_D.shape, weight_D, bias_D, eps).to(x_TD.dtype)
