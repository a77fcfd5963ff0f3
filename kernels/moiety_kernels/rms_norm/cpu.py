"""RMS normalisation on a CPU: float32 rows, contiguous. T tokens, D width."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import add_scaled_row, sum_squares, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32  # tokens per task


class RmsNormArguments(NamedTuple):
    """Arguments of the normalisation of T rows; all tensors are float32 and contiguous."""

    x_TD: Address
    delta_TD: Address  # added to x first, in x's memory, or 0
    weight_D: Address
    out_TD: Address
    tokens: Int64  # T
    width: Int64  # D
    eps: Float64


def fits(x_TD: Tensor, weight_D: Tensor, delta_TD: Tensor | None = None) -> bool:
    """Return whether the functions here support these tensors; `delta_TD` has the shape of x."""
    return (
        x_TD.dtype is torch.float32
        and weight_D.dtype is torch.float32
        and x_TD.dim() == 2
        and x_TD.shape[1] % LANES == 0
        and x_TD.shape[0] * x_TD.shape[1] > 0
        and x_TD.is_contiguous()
        and (delta_TD is None or (delta_TD.dtype is torch.float32 and delta_TD.is_contiguous()))
    )


def rms_norm(x_TD: Tensor, weight_D: Tensor, eps: float) -> Tensor:
    """Return the normalised rows."""
    out_TD = torch.empty_like(x_TD)
    _launch(x_TD, 0, weight_D, out_TD, eps)
    return out_TD


def add_rms_norm(x_TD: Tensor, delta_TD: Tensor, weight_D: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Return (x + delta, in x's memory; the normalised sum, in delta's memory)."""
    _launch(x_TD, delta_TD.data_ptr(), weight_D, delta_TD, eps)
    return x_TD, delta_TD


def _launch(x_TD: Tensor, delta: int, weight_D: Tensor, out_TD: Tensor, eps: float) -> None:
    tokens, width = x_TD.shape
    tasks = -(-tokens // _BLOCK)
    args = RmsNormArguments(
        x_TD=x_TD.data_ptr(),
        delta_TD=delta,
        weight_D=weight_D.data_ptr(),
        out_TD=out_TD.data_ptr(),
        tokens=tokens,
        width=width,
        eps=eps,
    )
    team().run(_task, tasks, args)


def _task(args: RmsNormArguments, task: int, scratch: int) -> None:
    x_TD, delta_TD, weight_D, out_TD = args.x_TD, args.delta_TD, args.weight_D, args.out_TD
    tokens, width, eps = args.tokens, args.width, args.eps
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        x_D = x_TD + 4 * width * t
        if delta_TD:
            add_scaled_row(x_D, delta_TD + 4 * width * t, width, 1.0, x_D)
        factor = 1.0 / (sum_squares(x_D, width) / width + eps) ** 0.5
        weigh_row(x_D, width, factor, weight_D, out_TD + 4 * width * t)
