"""Linear maps on a CPU: float32 rows, bfloat16, float32 or quantized weight. M rows, N outputs, K inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.gemm import (
    MAX_WIDTH,
    ROWS_AT,
    is_multipliable,
    point_rows,
    product_kind,
    stored_as,
    weight_rows,
)
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.products import Product, multiply, plan_of
from moiety_kernels.cpu.structs import Address, Int64, address_of
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.unpacking import WeightArguments, weight_arguments
from moiety_kernels.cpu.values import LANES

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization.weight import QuantizedWeight


class LinearArguments(NamedTuple):
    """Arguments of a linear map; a task is a block of rows and a chunk of outputs."""

    x_MK: Address  # float32
    weight_NK: WeightArguments
    bias_N: Address  # float32, or 0
    out_MN: Address  # float32, contiguous
    m: Int64
    n: Int64
    k: Int64
    product: Product
    x_stride: Int64  # bytes from one row of x to the next
    chunk: Int64  # outputs per task
    num_chunks: Int64
    block: Int64  # rows per task


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
    plan = plan_of(product_kind(weight_NK), stored_as(weight_NK), m, n, k, team().num_threads)
    args = LinearArguments(
        x_MK=x_MK.data_ptr(),
        weight_NK=weight_arguments(weight_NK),
        bias_N=address_of(bias_N),
        out_MN=out_MN.data_ptr(),
        m=m,
        n=n,
        k=k,
        product=plan.product,
        x_stride=4 * x_MK.stride(0),
        chunk=plan.chunk,
        num_chunks=plan.num_chunks,
        block=plan.block,
    )
    team().run(_task, plan.num_tasks, args)
    return out_MN


def _task(args: LinearArguments, task: int, scratch: int) -> None:
    m, n, k, product = args.m, args.n, args.k, args.product
    x_stride, chunk, num_chunks, block = args.x_stride, args.chunk, args.num_chunks, args.block
    row, column = (task // num_chunks) * block, (task % num_chunks) * chunk
    num_rows, num_columns = min(block, m - row), min(chunk, n - column)
    rows = scratch + ROWS_AT
    point_rows(rows, args.x_MK + row * x_stride, x_stride, num_rows)
    w = weight_rows(args.weight_NK, product.kind, column, num_columns, k, scratch, 0)
    out = args.out_MN + 4 * (row * n + column)
    multiply(product, rows, num_rows, w, num_columns, k, out, 4 * n, scratch)
    bias_N = args.bias_N
    if bias_N:
        for i in range(num_rows):
            for j in range(num_columns):
                store_f32(out + 4 * i * n, j, load_f32(out + 4 * i * n, j) + load_f32(bias_N, column + j))
