"""Definition of the output gate. T tokens, H heads, d head width, C columns: H, or H · d."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.output_gate.spec import GateKind


def output_gate(out_THd: Tensor, gate_TC: Tensor, kind: GateKind) -> Tensor:
    """Return out_THd times the activated gate, which is computed in float32 and rounded to the type of out_THd."""
    wide_TC = gate_TC.float()
    if kind == "gelu_tanh":
        factor_TC = functional.gelu(wide_TC, approximate="tanh")
    else:
        factor_TC = torch.sigmoid(wide_TC) if kind == "sigmoid" else functional.softplus(wide_TC)
    tokens, heads, _ = out_THd.shape
    return out_THd * factor_TC.to(out_THd.dtype).view(tokens, heads, gate_TC.shape[1] // heads)
