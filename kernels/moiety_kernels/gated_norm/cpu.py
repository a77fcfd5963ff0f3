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
    weight_V: Address
    out_RV: Address
    rows: Int64  # R
    heads: Int64  # M
    width: Int64  # V
    gate_stride: Int64  # bytes from one token's gates to the next one's
    is_sigmoid: Int64
    eps: Float64


def fits(x_TMV: Tensor, gate_TMV: Tensor, weight_V: Tensor) -> bool:
    """Return whether `gated_norm` supports these tensors."""
    return (
        x_TMV.dtype is gate_TMV.dtype is weight_V.dtype is torch.float32
        and x_TMV.shape[2] % LANES == 0
        and x_TMV.numel() > 0
        and x_TMV.is_contiguous()
        and gate_TMV.stride()[1:] == (gate_TMV.shape[2], 1)
    )


def gated_norm(x_TMV: Tensor, gate_TMV: Tensor, weight_V: Tensor, eps: float, gate: str) -> Tensor:
    """Return rms_norm(x) · weight · gate, contiguous."""
    out_TMV = torch.empty_like(x_TMV)
    tokens, heads, width = x_TMV.shape
    args = GatedNormArguments(
        x_RV=x_TMV.data_ptr(),
        gate_TMV=gate_TMV.data_ptr(),
        weight_V=weight_V.data_ptr(),
        out_RV=out_TMV.data_ptr(),
        rows=tokens * heads,
        heads=heads,
        width=width,
        gate_stride=4 * gate_TMV.stride(0),
        is_sigmoid=gate == "sigmoid",
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
        factor = 1.0 / (sum_squares(x_V, width) / width + args.eps) ** 0.5
        weigh_row(x_V, width, factor, args.weight_V, out_V)
        if args.is_sigmoid:
            sigmoid_glu_row(gate_V, out_V, width, out_V)
        else:
            swiglu_row(gate_V, out_V, width, out_V)
