"""Gate of attention's output: heads are multiplied by an activation of a projection of the layer's input."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_kernels.checks import require
from moiety_kernels.lazy_imports import lazy_import
from moiety_kernels.output_gate import reference
from moiety_kernels.output_gate.spec import GateKind

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GateKind", "output_gate"]

_cpu = lazy_import(__name__, "cpu")


def output_gate(out_THd: Tensor, gate_TC: Tensor, kind: GateKind) -> Tensor:
    """Return out_THd, which may be overwritten, times the sigmoid, the softplus or the GELU of gate_TC.

    The gate has a column for each head, or one for each value of all heads.
    """
    tokens, heads, width = out_THd.shape
    require(
        gate_TC.shape in ((tokens, heads), (tokens, heads * width)),
        f"the gate has shape {tuple(gate_TC.shape)}; it needs {heads} or {heads * width} columns for {tokens} tokens",
    )
    if out_THd.is_cpu and _cpu().fits(out_THd, gate_TC):
        fast: Tensor = _cpu().output_gate(out_THd, gate_TC, kind)
        return fast
    return reference.output_gate(out_THd, gate_TC, kind)
