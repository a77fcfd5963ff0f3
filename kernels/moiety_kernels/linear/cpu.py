"""Linear maps on a CPU: float32 rows, bfloat16, float32 or quantized weight. M rows, N outputs, K inputs."""

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
    is_multipliable,
    multiply,
    point_rows,
    product_kind,
    row_block,
    weight_rows,
)
from moiety_kernels.cpu.memory import load_f32, load_i64, store_f32
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.unpacking import format_of

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization.weight import QuantizedWeight

_LAYOUT = struct.Struct("15q")


def fits(x_MK: Tensor, weight_NK: Tensor | QuantizedWeight) -> bool:
    """Return whether `linear` supports these tensors."""
    width = x_MK.shape[-1]
    return (
        x_MK.dtype is torch.float32
        and width % LANES == 0
        and 0 < width <= MAX_WIDTH
        and x_MK.dim() == 2
        and x_MK.stride(1) == 1
        and is_multipliable(weight_NK)
    )


def linear(x_MK: Tensor, weight_NK: Tensor | QuantizedWeight, bias_N: Tensor | None) -> Tensor:
    """Return x · weightᵀ + bias."""
    m, k = x_MK.shape
    n = weight_NK.shape[0]
    out_MN = torch.empty(m, n)
    if m == 0 or n == 0:
        return out_MN
    kind = product_kind(weight_NK)
    block = row_block(kind, k)
    chunk = chunk_rows(weight_NK, n, m, -(-m // block))
    tasks = -(-m // block) * -(-n // chunk)
    bias = 0 if bias_N is None else bias_N.data_ptr()
    values, scales, bits, shift = format_of(weight_NK)
    team().run(
        task_address(_task),
        tasks,
        _LAYOUT,
        x_MK.data_ptr(),
        values,
        bias,
        out_MN.data_ptr(),
        m,
        n,
        k,
        kind,
        x_MK.stride(0) * 4,
        chunk,
        -(-n // chunk),
        block,
        scales,
        bits,
        shift,
    )
    return out_MN


def _task(args: int, task: int, scratch: int) -> None:
    m, n, k, kind = load_i64(args, 4), load_i64(args, 5), load_i64(args, 6), load_i64(args, 7)
    x_stride, chunk, num_chunks = load_i64(args, 8), load_i64(args, 9), load_i64(args, 10)
    block = load_i64(args, 11)
    row, column = (task // num_chunks) * block, (task % num_chunks) * chunk
    num_rows, num_columns = min(block, m - row), min(chunk, n - column)
    rows = scratch + ROWS_AT
    point_rows(rows, load_i64(args, 0) + row * x_stride, x_stride, num_rows)
    w = weight_rows(
        load_i64(args, 1), load_i64(args, 12), load_i64(args, 13), load_i64(args, 14), kind, column, num_columns, k,
        scratch, 0,
    )  # fmt: skip
    out = load_i64(args, 3) + 4 * (row * n + column)
    multiply(rows, num_rows, w, kind, num_columns, k, out, 4 * n, scratch)
    bias = load_i64(args, 2)
    if bias:
        for i in range(num_rows):
            for j in range(num_columns):
                store_f32(out + 4 * i * n, j, load_f32(out + 4 * i * n, j) + load_f32(bias, column + j))
