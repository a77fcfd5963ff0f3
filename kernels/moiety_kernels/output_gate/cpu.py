"""Output gate on a CPU, in place, value by value, so that a row does not depend on the rows beside it.

T tokens, H heads, d head width, C columns of the gate: H, or H · d.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import team

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.output_gate.spec import GateKind

_BLOCK = 4  # tokens per task
_LINEAR = 20.0  # softplus(x) is x from here on, as in torch


class OutputGateArguments(NamedTuple):
    """Arguments of the gates of T tokens."""

    out_THd: Address  # float32, contiguous
    gate_TC: Address  # float32, contiguous
    tokens: Int64  # T
    columns: Int64  # C
    shared_by: Int64  # values of a head that share a column: 1, or d
    softplus: Int64


def fits(out_THd: Tensor, gate_TC: Tensor) -> bool:
    """Return whether `output_gate` supports these tensors."""
    both = out_THd, gate_TC
    return out_THd.shape[0] > 0 and all(one.dtype is torch.float32 and one.is_contiguous() for one in both)


def output_gate(out_THd: Tensor, gate_TC: Tensor, kind: GateKind) -> Tensor:
    """Return out_THd, multiplied in place."""
    tokens, heads, width = out_THd.shape
    columns = gate_TC.shape[1]
    team().run(
        _task,
        -(-tokens // _BLOCK),
        OutputGateArguments(
            out_THd=out_THd.data_ptr(),
            gate_TC=gate_TC.data_ptr(),
            tokens=tokens,
            columns=columns,
            shared_by=heads * width // columns,
            softplus=kind == "softplus",
        ),
    )
    return out_THd


@jit
def _factor(gate: float, softplus: int) -> float:
    if not softplus:
        return 1.0 / (1.0 + math.exp(-gate))
    return gate if gate > _LINEAR else math.log1p(math.exp(gate))


def _task(args: OutputGateArguments, task: int, scratch: int) -> None:
    columns, shared_by = args.columns, args.shared_by
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        gates, values = args.gate_TC + 4 * columns * t, args.out_THd + 4 * columns * shared_by * t
        for column in range(columns):
            factor = _factor(load_f32(gates, column), args.softplus)
            for i in range(column * shared_by, (column + 1) * shared_by):
                store_f32(values, i, load_f32(values, i) * factor)
