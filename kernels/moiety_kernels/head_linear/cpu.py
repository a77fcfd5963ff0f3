"""Linear maps of heads on a CPU: float32 rows, bfloat16 or float32 weights. M rows, H heads, N outputs, K inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.gemm import (
    MAX_WIDTH,
    ROWS_AT,
    point_rows,
    product_kind,
    weight_rows,
)
from moiety_kernels.cpu.products import Product, multiply, plan_of
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.unpacking import PLAIN, WeightArguments
from moiety_kernels.cpu.values import LANES

if TYPE_CHECKING:
    from torch import Tensor


class HeadLinearArguments(NamedTuple):
    """Arguments of the products of each head; a task is a head, a block of rows and a chunk of outputs."""

    x_MHK: Address  # float32; the first K entries of each head, which may be wider
    weight_HNK: Address  # contiguous
    out_MHN: Address  # float32; the first N entries of each head, which may be wider
    m: Int64
    n: Int64
    k: Int64
    product: Product
    x_stride: Int64  # bytes from one row of x to the next
    head_stride: Int64  # bytes from one head of x to the next
    heads: Int64  # H
    chunk: Int64  # outputs per task
    chunks: Int64
    block: Int64  # rows per task
    out_bytes: Int64  # from one head of the output to the next


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
    plan = plan_of(product_kind(weight_HNK), weight_HNK.dtype, m, n, k, team().num_threads, heads)
    team().run(
        _task,
        plan.num_tasks,
        HeadLinearArguments(
            x_MHK=x_MHK.data_ptr(),
            weight_HNK=weight_HNK.data_ptr(),
            out_MHN=out_MHN.data_ptr(),
            m=m,
            n=n,
            k=k,
            product=plan.product,
            x_stride=4 * x_MHK.stride(0),
            head_stride=4 * x_MHK.stride(1),
            heads=heads,
            chunk=plan.chunk,
            chunks=plan.num_chunks,
            block=plan.block,
            out_bytes=4 * out_MHN.shape[2],
        ),
    )


def _task(args: HeadLinearArguments, task: int, scratch: int) -> None:
    m, n, k, product = args.m, args.n, args.k, args.product
    x_stride, head_stride, heads = args.x_stride, args.head_stride, args.heads
    chunk, chunks, block, out_bytes = args.chunk, args.chunks, args.block, args.out_bytes
    column, item = task % chunks * chunk, task // chunks
    head, row = item % heads, item // heads * block
    num_rows, num_columns = min(block, m - row), min(chunk, n - column)
    rows = scratch + ROWS_AT
    point_rows(rows, args.x_MHK + row * x_stride + head * head_stride, x_stride, num_rows)
    weight = WeightArguments(values=args.weight_HNK, scales=0, numbers=PLAIN, shift=0)
    w = weight_rows(weight, product.kind, head * n + column, num_columns, k, scratch, 0)
    out = args.out_MHN + (row * heads + head) * out_bytes + 4 * column
    multiply(product, rows, num_rows, w, num_columns, k, out, heads * out_bytes, scratch)
