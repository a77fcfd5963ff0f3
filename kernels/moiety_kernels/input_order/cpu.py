"""Gather of inputs on a CPU, so that recorded decode steps contain it. T tokens, K inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i32, store_f32
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import team

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 8  # tokens per task


class GatherArguments(NamedTuple):
    """Arguments of the gather of T rows."""

    x_TK: Address  # float32
    order_K: Address  # int32
    out_TK: Address  # float32, contiguous
    tokens: Int64  # T
    width: Int64  # K of the order
    x_stride: Int64  # bytes from one row of x to the next


def fits(x_TK: Tensor, order_K: Tensor) -> bool:
    """Return whether `gather_inputs` supports these tensors."""
    return (
        x_TK.dim() == 2
        and x_TK.shape[0] > 0
        and x_TK.dtype is torch.float32
        and x_TK.stride(1) == 1
        and order_K.dtype is torch.int32
        and order_K.is_contiguous()
    )


def gather_inputs(x_TK: Tensor, order_K: Tensor) -> Tensor:
    """Return x[:, order], with zeros where the order is -1."""
    tokens, width = len(x_TK), len(order_K)
    out_TK = torch.empty(tokens, width)
    args = GatherArguments(
        x_TK=x_TK.data_ptr(),
        order_K=order_K.data_ptr(),
        out_TK=out_TK.data_ptr(),
        tokens=tokens,
        width=width,
        x_stride=4 * x_TK.stride(0),
    )
    team().run(_task, -(-tokens // _BLOCK), args)
    return out_TK


@jit
def gather_row(row_K: int, order_K: int, width: int, out_K: int) -> None:
    """Write the float32 values of a row in the order; all arguments but `width` are addresses."""
    for k in range(width):
        store_f32(out_K, k, load_f32(row_K, load_i32(order_K, k)))


@jit
def _gather_padded_row(row_K: int, order_K: int, width: int, out_K: int) -> None:
    """Write a row as `gather_row`, with zeros where the order is -1."""
    for k in range(width):
        index = load_i32(order_K, k)
        value = 0.0
        if index >= 0:
            value = load_f32(row_K, index)
        store_f32(out_K, k, value)


def _task(args: GatherArguments, task: int, scratch: int) -> None:
    width = args.width
    for t in range(task * _BLOCK, min(args.tokens, (task + 1) * _BLOCK)):
        _gather_padded_row(args.x_TK + t * args.x_stride, args.order_K, width, args.out_TK + 4 * width * t)
