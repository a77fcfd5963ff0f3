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
_KINDS = ("sigmoid", "softplus", "gelu_tanh")
_LINEAR = 20.0  # softplus(x) is x from here on, as in torch

_GELU = 2.0 * math.sqrt(2.0 / math.pi)


class OutputGateArguments(NamedTuple):
    """Arguments of the gates of T tokens."""

    out_THd: Address  # float32, contiguous
    gate_TC: Address  # float32, contiguous
    tokens: Int64  # T
    columns: Int64  # C
    shared_by: Int64  # values of a head that share a column: 1, or d
    kind: Int64  # index in _KINDS


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
            kind=_KINDS.index(kind),
        ),
    )
    return out_THd


@jit
def _factor(gate: float, kind: int) -> float:
    if kind == 0:
        return 1.0 / (1.0 + math.exp(-gate))
    if kind == 2:  # gelu, where (1 + tanh(x)) / 2 is sigmoid(2 · x)
        return gate / (1.0 + math.exp(-_GELU * (gate + 0.044715 * gate * gate * gate)))
    return gate if gate > _LINEAR else math.log1p(math.exp(gate))


def _task(args: OutputGateArguments, task: int, scratch: int) -> None:
    columns, shared_by = args.columns, args.shared_by
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        gates, values = args.gate_TC + 4 * columns * t, args.out_THd + 4 * columns * shared_by * t
        for column in range(columns):
            factor = _factor(load_f32(gates, column), args.kind)
            for i in range(column * shared_by, (column + 1) * shared_by):
                store_f32(values, i, load_f32(values, i) * factor)
