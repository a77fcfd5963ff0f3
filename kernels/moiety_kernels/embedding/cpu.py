"""Embedding lookup on a CPU: rows of a float32 or bfloat16 table, as float32.

It is an ordinary job, so a replayed step includes it. T tokens, V rows of the table, D width.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.memory import load_f64, load_i64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import copy_row, scale_row, widen_row

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT = struct.Struct("7qd")
_BLOCK = 32  # tokens per task


def fits(token_ids_T: Tensor, table_VD: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `embedding` supports these tensors and this output type."""
    return (
        dtype is torch.float32
        and table_VD.dtype in (torch.float32, torch.bfloat16)
        and table_VD.stride(1) == 1
        and table_VD.shape[1] % LANES == 0
        and token_ids_T.dtype is torch.int64
        and token_ids_T.is_contiguous()
        and token_ids_T.shape[0] > 0
    )


def embedding(token_ids_T: Tensor, table_VD: Tensor, factor: float) -> Tensor:
    """Return [T, D], float32."""
    tokens, width = token_ids_T.shape[0], table_VD.shape[1]
    out_TD = torch.empty(tokens, width)
    row_bytes = table_VD.stride(0) * table_VD.element_size()
    widens = int(table_VD.dtype is torch.bfloat16)
    pointers = token_ids_T.data_ptr(), table_VD.data_ptr(), out_TD.data_ptr()
    tasks = -(-tokens // _BLOCK)
    team().run(task_address(_task), tasks, _LAYOUT, *pointers, tokens, width, row_bytes, widens, factor)
    return out_TD


def _task(args: int, task: int, scratch: int) -> None:
    token_ids, table, out = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2)
    tokens, width, row_bytes = load_i64(args, 3), load_i64(args, 4), load_i64(args, 5)
    widens, factor = load_i64(args, 6), load_f64(args, 7)
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        source, target = table + load_i64(token_ids, t) * row_bytes, out + 4 * width * t
        if widens:
            widen_row(source, width, target)
        else:
            copy_row(source, width, target)
        if factor != 1.0:
            scale_row(target, width, factor)
