"""Linear maps of heads on a CPU: float32 rows, bfloat16 or float32 weights. M rows, H heads, N outputs, K inputs."""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.gemm import (
    MAX_WIDTH,
    ROWS_AT,
    chunk_rows,
    multiply,
    point_rows,
    product_kind,
    row_block,
    weight_rows,
)
from moiety_kernels.cpu.memory import load_i64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.unpacking import PLAIN

if TYPE_CHECKING:
    from torch import Tensor

_LAYOUT = struct.Struct("14q")


def fits(x_MHK: Tensor, weight_HNK: Tensor, width: int) -> bool:
    """Return whether the functions here support these tensors, with the first `width` entries of each head of x."""
    rows, heads, _ = x_MHK.shape
    return (
        x_MHK.dtype is torch.float32
        and weight_HNK.dtype in (torch.bfloat16, torch.float32)
        and width % LANES == 0
        and 0 < width <= MAX_WIDTH
        and 0 < rows * heads * weight_HNK.shape[1] // 16 < MAX_TASKS
        and weight_HNK.is_contiguous()
        and x_MHK.stride(2) == 1
    )


def head_linear(x_MHK: Tensor, weight_HNK: Tensor) -> Tensor:
    """Return out_MHN, contiguous."""
    out_MHN = torch.empty(*x_MHK.shape[:2], weight_HNK.shape[1])
    multiply_heads(x_MHK, weight_HNK, out_MHN)
    return out_MHN


def multiply_heads(x_MHK: Tensor, weight_HNK: Tensor, out_MHN: Tensor) -> None:
    """Write the first N entries of each head of `out`, contiguous, from the first K of x; either may be wider."""
    m, heads, _ = x_MHK.shape
    n, k = weight_HNK.shape[1:]
    kind = product_kind(weight_HNK)
    block = row_block(kind, k)
    blocks = -(-m // block)
    chunk = chunk_rows(weight_HNK, n, m, heads * blocks)
    chunks = -(-n // chunk)
    team().run(
        task_address(_task),
        heads * blocks * chunks,
        _LAYOUT,
        x_MHK.data_ptr(),
        weight_HNK.data_ptr(),
        out_MHN.data_ptr(),
        m,
        n,
        k,
        kind,
        4 * x_MHK.stride(0),
        4 * x_MHK.stride(1),
        heads,
        chunk,
        chunks,
        block,
        4 * out_MHN.shape[2],
    )


def _task(args: int, task: int, scratch: int) -> None:
    m, n, k, kind = load_i64(args, 3), load_i64(args, 4), load_i64(args, 5), load_i64(args, 6)
    x_stride, head_stride, heads = load_i64(args, 7), load_i64(args, 8), load_i64(args, 9)
    chunk, chunks, block, out_bytes = load_i64(args, 10), load_i64(args, 11), load_i64(args, 12), load_i64(args, 13)
    column, item = task % chunks * chunk, task // chunks
    head, row = item % heads, item // heads * block
    num_rows, num_columns = min(block, m - row), min(chunk, n - column)
    rows = scratch + ROWS_AT
    point_rows(rows, load_i64(args, 0) + row * x_stride + head * head_stride, x_stride, num_rows)
    w = weight_rows(load_i64(args, 1), 0, PLAIN, 0, kind, head * n + column, num_columns, k, scratch, 0)
    out = load_i64(args, 2) + (row * heads + head) * out_bytes + 4 * column
    multiply(rows, num_rows, w, kind, num_columns, k, out, heads * out_bytes, scratch)
