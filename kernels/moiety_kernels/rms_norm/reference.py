"""Definition of RMS normalisation (Zhang & Sennrich 2019). T tokens, D width."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return x / sqrt(mean(x²) + eps) · weight, computed in float32, in x's dtype."""
    x = x_TD.float()
    normed = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)
    return (normed.to(x_TD.dtype) * weight_D).to(x_TD.dtype)


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, rms_norm(x + delta)); the inputs are unchanged."""
    total_TD = x_TD + delta_TD
    return total_TD, rms_norm(total_TD, weight_D, eps)
