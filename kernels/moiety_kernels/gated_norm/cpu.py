"""Gated RMS normalisation on a CPU: float32 rows, contiguous. T tokens, M heads of width V."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES, Floats, Int
from moiety_kernels.cpu.vectors import over_one_plus_exp, sum_squares, swiglu_row, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 64  # rows per task


class GatedNormArguments(NamedTuple):
    """Arguments of the normalisation of R = T · M rows; the tensors are float32."""

    x_RV: Address
    gate_TMV: Address
    weight_MV: Address
    out_RV: Address
    rows: Int64  # R
    heads: Int64  # M
    width: Int64  # V
    gate_stride: Int64  # bytes from one token's gates to the next one's
    weight_stride: Int64  # bytes from one head's weights to the next one's, or 0
    is_sigmoid: Int64
    gates_first: Int64
    eps: Float64


def fits(x_TMV: Tensor, gate_TMV: Tensor, weight_MV: Tensor) -> bool:
    """Return whether `gated_norm` supports these tensors."""
    return (
        x_TMV.dtype is gate_TMV.dtype is weight_MV.dtype is torch.float32
        and x_TMV.shape[2] % LANES == 0
        and x_TMV.numel() > 0
        and x_TMV.is_contiguous()
        and weight_MV.is_contiguous()
        and gate_TMV.stride()[1:] == (gate_TMV.shape[2], 1)
    )


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_MV: Tensor, eps: float, gate: str) -> Tensor:
    """Return the gated normalisation, contiguous."""
    out_TMV = torch.empty_like(x_TMV)
    tokens, heads, width = x_TMV.shape
    args = GatedNormArguments(
        x_RV=x_TMV.data_ptr(),
        gate_TMV=gate_TMV.data_ptr(),
        weight_MV=weight_MV.data_ptr(),
        out_RV=out_TMV.data_ptr(),
        rows=tokens * heads,
        heads=heads,
        width=width,
        gate_stride=4 * gate_TMV.stride(0),
        weight_stride=0 if weight_MV.shape[0] == 1 else 4 * width,
        is_sigmoid=gate == "sigmoid",
        gates_first=gate == "silu_first",
        eps=eps,
    )
    team().run(_task, -(-tokens * heads // _BLOCK), args)
    return out_TMV


def _sigmoid_glu(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = sigmoid(gate[i]) · up[i]."""
    for i in e.loop(count, LANES):
        out[i] = over_one_plus_exp(e, up[i], gate[i])


sigmoid_glu_row = function("moiety_sigmoid_glu", _sigmoid_glu)


def _task(args: GatedNormArguments, task: int, scratch: int) -> None:
    width, heads = args.width, args.heads
    for r in range(task * _BLOCK, min(args.rows, (task + 1) * _BLOCK)):
        x_V, out_V = args.x_RV + 4 * width * r, args.out_RV + 4 * width * r
        gate_V = args.gate_TMV + r // heads * args.gate_stride + 4 * width * (r % heads)
        if args.gates_first:
            swiglu_row(gate_V, x_V, width, out_V)
            x_V = out_V
        factor = 1.0 / (sum_squares(x_V, width) / width + args.eps) ** 0.5
        weigh_row(x_V, width, factor, args.weight_MV + r % heads * args.weight_stride, out_V)
        if args.is_sigmoid:
            sigmoid_glu_row(gate_V, out_V, width, out_V)
        elif not args.gates_first:
            swiglu_row(gate_V, out_V, width, out_V)
