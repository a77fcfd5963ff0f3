"""Definition of the gated RMS normalisation. T tokens, M heads of width V."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_MV: Tensor, eps: float, gate: str) -> Tensor:
    """Return the gated normalisation, in x's dtype."""
    x = x_TMV.float()
    if gate == "silu_first":
        x = x * silu(gate_TMV.float())
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_MV.float()
    if gate != "silu_first":
        normed = normed * (silu(gate_TMV.float()) if gate == "silu" else gate_TMV.float().sigmoid())
    return normed.to(x_TMV.dtype)
