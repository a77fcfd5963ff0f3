"""Sums of scaled tensors and rows with a factor each, on a CPU, value by value. T rows, F factors."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import add_scaled_row, copy_row, scale_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 4096  # values per task


class ScaledSumArguments(NamedTuple):
    """Arguments of out = factor · x + y_factor · y, over `num_values`."""

    x: Address  # float32, contiguous
    y: Address  # float32, contiguous; 0: there is none
    out: Address
    num_values: Int64
    factor: Float64
    y_factor: Float64


class ScaleRowsArguments(NamedTuple):
    """Arguments of the scaling of rows."""

    x_TC: Address  # float32
    stride: Int64  # values from one row to the next
    factor_F: Address  # float32
    row_T: Address  # int64 or int32, factor of each row; 0: the factors are in the order of the rows
    wide_rows: Int64  # 1 for int64
    out_TC: Address
    rows: Int64  # T
    width: Int64  # C
    block: Int64  # rows per task


def fits(*tensors: Tensor) -> bool:
    """Return whether `scaled_sum` supports these tensors."""
    count = tensors[0].numel()
    return 0 < count < _BLOCK * MAX_TASKS and count % LANES == 0 and all(map(_is_plain, tensors))


def fits_rows(x_T: Tensor, factor_F: Tensor, row_T: Tensor | None) -> bool:
    """Return whether `scale_rows` supports these tensors."""
    rows = x_T.shape[0]
    width = x_T.numel() // max(1, rows)
    in_order = row_T is None or (row_T.dtype in (torch.int64, torch.int32) and row_T.is_contiguous())
    fits_x = x_T.dtype is torch.float32 and _has_whole_rows(x_T) and (width == 1 or (width > 0 and width % LANES == 0))
    return 0 < rows < MAX_TASKS and in_order and fits_x and _is_plain(factor_F)


def scaled_sum(x: Tensor, factor: float, y: Tensor | None, y_factor: float) -> Tensor:
    """Return factor · x + y_factor · y in new memory."""
    out, count = torch.empty_like(x), x.numel()
    args = ScaledSumArguments(
        x=x.data_ptr(),
        y=0 if y is None else y.data_ptr(),
        out=out.data_ptr(),
        num_values=count,
        factor=factor,
        y_factor=y_factor,
    )
    team().run(_sum_task, -(-count // _BLOCK), args)
    return out


def scale_rows(x_T: Tensor, factor_F: Tensor, row_T: Tensor | None) -> Tensor:
    """Return each row times its factor, in new memory."""
    out, rows = torch.empty(x_T.shape), x_T.shape[0]
    width = x_T.numel() // rows
    block = max(1, _BLOCK // width)
    args = ScaleRowsArguments(
        x_TC=x_T.data_ptr(),
        stride=x_T.stride(0),
        factor_F=factor_F.data_ptr(),
        row_T=0 if row_T is None else row_T.data_ptr(),
        wide_rows=row_T is not None and row_T.dtype is torch.int64,
        out_TC=out.data_ptr(),
        rows=rows,
        width=width,
        block=block,
    )
    team().run(_rows_task, -(-rows // block), args)
    return out


def _is_plain(tensor: Tensor) -> bool:
    return tensor.dtype is torch.float32 and tensor.is_contiguous()


def _has_whole_rows(x_T: Tensor) -> bool:
    """Return whether the values of each row lie one after the other."""
    stride = 1
    for dim in range(x_T.dim() - 1, 0, -1):
        if x_T.stride(dim) != stride and x_T.shape[dim] > 1:
            return False
        stride *= x_T.shape[dim]
    return True


def _sum_task(args: ScaledSumArguments, task: int, scratch: int) -> None:
    first = task * _BLOCK
    count, out = min(args.num_values - first, _BLOCK), args.out + 4 * first
    copy_row(args.x + 4 * first, count, out)
    if args.factor != 1.0:
        scale_row(out, count, args.factor)
    if args.y:
        add_scaled_row(out, args.y + 4 * first, count, args.y_factor, out)


def _rows_task(args: ScaleRowsArguments, task: int, scratch: int) -> None:
    width = args.width
    for row in range(task * args.block, min(args.rows, (task + 1) * args.block)):
        place = row
        if args.row_T:
            place = load_i64(args.row_T, row) if args.wide_rows else load_i32(args.row_T, row)
        x, out, factor = (
            args.x_TC + 4 * args.stride * row,
            args.out_TC + 4 * width * row,
            load_f32(args.factor_F, place),
        )
        if width == 1:
            store_f32(out, 0, load_f32(x, 0) * factor)
        else:
            copy_row(x, width, out)
            scale_row(out, width, factor)
