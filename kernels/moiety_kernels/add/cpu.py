"""Sums on a CPU: float32 rows, contiguous. T tokens, D width."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_i64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import add_scaled_row

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT = struct.Struct("4q")
_BLOCK = 32  # tokens a task


def fits(x_TD: Tensor) -> bool:
    """Whether `add` takes this tensor."""
    return (
        x_TD.dtype is torch.float32
        and x_TD.dim() == 2
        and x_TD.shape[1] % LANES == 0
        and x_TD.shape[0] * x_TD.shape[1] > 0
        and x_TD.is_contiguous()
    )


def add(x_TD: Tensor, y_TD: Tensor) -> Tensor:
    """The sum, in x's memory."""
    tokens, width = x_TD.shape
    pointers = x_TD.data_ptr(), y_TD.data_ptr()
    team().run(task_address(_task), -(-tokens // _BLOCK), _LAYOUT, *pointers, tokens, width)
    return x_TD


def _task(args: int, task: int, scratch: int) -> None:
    x, y, tokens, width = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        row = x + 4 * width * t
        add_scaled_row(row, y + 4 * width * t, width, 1.0, row)
