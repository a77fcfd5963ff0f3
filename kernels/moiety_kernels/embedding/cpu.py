"""Embedding lookup on a CPU: rows of a float32 or bfloat16 table, as float32.

It is an ordinary job, so a replayed step includes it. T tokens, V rows of the table, D width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.memory import load_i64, store_f32
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import copy_row, scale_row, widen_row

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK = 32  # tokens per task


class EmbeddingArguments(NamedTuple):
    """Arguments of the lookup of T rows."""

    token_ids_T: Address  # int64
    table_VD: Address  # float32, or bfloat16 if `widens`
    out_TD: Address  # float32
    tokens: Int64  # T
    rows: Int64  # V
    width: Int64  # D
    row_bytes: Int64  # from one row of the table to the next
    widens: Int64
    factor: Float64


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
    args = EmbeddingArguments(
        token_ids_T=token_ids_T.data_ptr(),
        table_VD=table_VD.data_ptr(),
        out_TD=out_TD.data_ptr(),
        tokens=tokens,
        rows=table_VD.shape[0],
        width=width,
        row_bytes=row_bytes,
        widens=widens,
        factor=factor,
    )
    team().run(_task, -(-tokens // _BLOCK), args)
    return out_TD


def _task(args: EmbeddingArguments, task: int, scratch: int) -> None:
    token_ids_T, table_VD, out_TD = args.token_ids_T, args.table_VD, args.out_TD
    tokens, width, row_bytes = args.tokens, args.width, args.row_bytes
    widens, factor = args.widens, args.factor
    for t in range(task * _BLOCK, min(tokens, (task + 1) * _BLOCK)):
        token_id, target = load_i64(token_ids_T, t), out_TD + 4 * width * t
        source = table_VD + token_id * row_bytes
        if token_id < 0 or token_id >= args.rows:
            for i in range(width):
                store_f32(target, i, math.nan)
        elif widens:
            widen_row(source, width, target)
        else:
            copy_row(source, width, target)
        if factor != 1.0:
            scale_row(target, width, factor)
