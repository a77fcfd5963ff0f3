"""Definition of the gated RMS normalisation. T tokens, M heads of width V."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn.functional import silu

if TYPE_CHECKING:
    from torch import Tensor


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_V: Tensor, eps: float, gate: str) -> Tensor:
    """Return rms_norm(x) · weight · gate, in x's dtype."""
    x = x_TMV.float()
    normed = x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight_V.float()
    opened = silu(gate_TMV.float()) if gate == "silu" else gate_TMV.float().sigmoid()
    return (normed * opened).to(x_TMV.dtype)
