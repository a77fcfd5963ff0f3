"""RMS normalisation on a CPU: float32 rows, contiguous. T tokens, D width."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_f64, load_i64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import add_scaled_row, sum_squares, weigh_row

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT = struct.Struct("7qd")
_BLOCK = 32  # tokens per task


def fits(x_TD: Tensor, weight_D: Tensor) -> bool:
    """Return whether the functions here support these tensors."""
    return (
        x_TD.dtype is torch.float32
        and weight_D.dtype is torch.float32
        and x_TD.dim() == 2
        and x_TD.shape[1] % LANES == 0
        and x_TD.shape[0] * x_TD.shape[1] > 0
        and x_TD.is_contiguous()
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
    pointers = x_TD.data_ptr(), delta, weight_D.data_ptr(), out_TD.data_ptr()
    team().run(task_address(_task), tasks, _LAYOUT, *pointers, tokens, width, 0, eps)


def _task(args: int, task: int, scratch: int) -> None:
    x, delta, weight, out = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
    tokens, width, eps = load_i64(args, 4), load_i64(args, 5), load_f64(args, 7)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        row = x + 4 * width * t
        if delta:
            add_scaled_row(row, delta + 4 * width * t, width, 1.0, row)
        factor = 1.0 / (sum_squares(row, width) / width + eps) ** 0.5
        weigh_row(row, width, factor, weight, out + 4 * width * t)
