"""Layer normalisation on a CPU: float32 rows, contiguous. T tokens, D width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import add_scaled_row, sum_squares, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 8  # tokens per task


class LayerNormArguments(NamedTuple):
    """Arguments of the normalisation of T rows; all tensors are float32 and contiguous."""

    x_TD: Address
    delta_TD: Address  # added to x first, in x's memory, or 0
    weight_D: Address
    bias_D: Address
    out_TD: Address
    tokens: Int64  # T
    width: Int64  # D
    eps: Float64


def fits(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor) -> bool:
    """Return whether the functions here support these tensors."""
    return (
        all(one.dtype is torch.float32 and one.is_contiguous() for one in (x_TD, weight_D, bias_D))
        and x_TD.dim() == 2
        and x_TD.shape[1] % LANES == 0
        and x_TD.shape[0] * x_TD.shape[1] > 0
    )


def layer_norm(x_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float) -> Tensor:
    """Return the normalised rows."""
    out_TD = torch.empty_like(x_TD)
    _launch(x_TD, 0, weight_D, bias_D, out_TD, eps)
    return out_TD


def add_layer_norm(
    x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, bias_D: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Return (x + delta, in x's memory; the normalised sum, in delta's memory)."""
    _launch(x_TD, delta_TD.data_ptr(), weight_D, bias_D, delta_TD, eps)
    return x_TD, delta_TD


def _launch(x_TD: Tensor, delta: int, weight_D: Tensor, bias_D: Tensor, out_TD: Tensor, eps: float) -> None:
    tokens, width = x_TD.shape
    args = LayerNormArguments(
        x_TD=x_TD.data_ptr(),
        delta_TD=delta,
        weight_D=weight_D.data_ptr(),
        bias_D=bias_D.data_ptr(),
        out_TD=out_TD.data_ptr(),
        tokens=tokens,
        width=width,
        eps=eps,
    )
    team().run(_task, -(-tokens // _BLOCK), args)


def _task(args: LayerNormArguments, task: int, scratch: int) -> None:
    width = args.width
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        x_D, out_D = args.x_TD + 4 * width * t, args.out_TD + 4 * width * t
        if args.delta_TD:
            add_scaled_row(x_D, args.delta_TD + 4 * width * t, width, 1.0, x_D)
        mean = 0.0
        for i in range(width):
            mean += load_f32(x_D, i)
        mean /= width
        for i in range(width):
            store_f32(out_D, i, load_f32(x_D, i) - mean)
        factor = 1.0 / (sum_squares(out_D, width) / width + args.eps) ** 0.5
        weigh_row(out_D, width, factor, args.weight_D, out_D)
        add_scaled_row(out_D, args.bias_D, width, 1.0, out_D)
