"""Compressed attention on a CPU: a task pools one entry, or copies the rows that one query sees.

So a token's bits depend neither on other tokens nor on how its sequence is cut. T tokens, H heads, d width of a row and
of an entry, C columns, E entries, K entries of a query, N slots, w rows of a history, m tokens of an entry.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i32
from moiety_kernels.cpu.structs import Address, Int64, address_of
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import copy_row, widen_row
from moiety_kernels.kv_store.caches import LayerCache
from moiety_kernels.paged_attention import cpu as paged_attention
from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.compressed_attention.runs import Entries, TokenRuns

_MAX_VALUES = 1 << 24  # that are copied at once: 64 MiB


class RunArguments(NamedTuple):
    """Rows of the tokens of a step, and of the positions before them."""

    rows_TC: Address  # float32, contiguous
    history_NwC: Address  # float32, contiguous
    run_T: Address  # int32
    position_T: Address  # int64
    run_start_R1: Address  # int32
    slot_R: Address  # int64
    columns: Int64
    size: Int64  # w


class PoolArguments(NamedTuple):
    """Arguments of the pooling of entries."""

    runs: RunArguments
    bias_mC: Address  # float32, contiguous
    token_E: Address  # int64
    entry_Ed: Address  # float32
    rate: Int64  # m
    width: Int64  # d
    overlaps: Int64


class CopyArguments(NamedTuple):
    """Arguments of the copy of the rows and entries that queries see."""

    runs: RunArguments
    pool_NEd: Address  # float32 or bfloat16, contiguous; 0: there are no entries
    slot_TK: Address  # int32, contiguous
    count_T: Address  # int32
    out_TKd: Address  # float32
    seen_T: Address  # int32, number of rows that each query sees
    first: Int64  # token of the first task
    most: Int64  # K of the slots
    most_seen: Int64  # K of the output
    itemsize: Int64  # of entries


def fits(rows_TC: Tensor, bias_mC: Tensor, history_NwC: Tensor) -> bool:
    """Return whether `pool_windows` supports these tensors."""
    three = rows_TC, bias_mC, history_NwC
    return (
        all(one.dtype is torch.float32 and one.is_contiguous() for one in three)
        and rows_TC.shape[0] < MAX_TASKS
        and 3 * 4 * bias_mC.shape[1] <= SCRATCH_BYTES
    )


def fits_attention(q_THd: Tensor, row_Td: Tensor, history_NWd: Tensor, entries: Entries | None) -> bool:
    """Return whether `compressed_attention` supports these tensors."""
    tokens, _, width = q_THd.shape
    pool = row_Td if entries is None else entries.pool_NEd
    rows = q_THd.new_empty(1, 1, 1, width)
    return (
        all(one.dtype is torch.float32 and one.is_contiguous() for one in (q_THd, row_Td, history_NWd))
        and pool.dtype in (torch.float32, torch.bfloat16)
        and pool.is_contiguous()
        and (entries is None or (entries.slot_TK.is_contiguous() and entries.count_T.is_contiguous()))
        and 0 < tokens < MAX_TASKS
        and width % LANES == 0
        and paged_attention.fits(q_THd[:1], LayerCache(rows, rows), torch.empty(1, 1, dtype=torch.int32))
    )


def pool_windows(
    rows_TC: Tensor, bias_mC: Tensor, history_NwC: Tensor, runs: TokenRuns, token_E: Tensor, *, overlaps: bool
) -> Tensor:
    """Return entry_Ed, contiguous."""
    rate, columns = bias_mC.shape
    width = columns // (2 if overlaps else 1)
    entry_Ed, kept = torch.empty(len(token_E), width), _contiguous(runs)
    args = PoolArguments(
        runs=_runs(rows_TC, history_NwC, kept),
        bias_mC=bias_mC.data_ptr(),
        token_E=token_E.data_ptr(),
        entry_Ed=entry_Ed.data_ptr(),
        rate=rate,
        width=width,
        overlaps=overlaps,
    )
    team().run(_pool_task, len(token_E), args)
    return entry_Ed


def compressed_attention(
    q_THd: Tensor,
    row_Td: Tensor,
    history_NWd: Tensor,
    runs: TokenRuns,
    entries: Entries | None,
    scale: float,
    sinks_H: Tensor,
) -> Tensor:
    """Return out_THd, contiguous."""
    tokens, _, width = q_THd.shape
    most = 0 if entries is None else entries.slot_TK.shape[1]
    most_seen, kept = history_NWd.shape[1] + most, _contiguous(runs)
    at_once = min(tokens, max(1, _MAX_VALUES // (most_seen * width)))
    seen_TKd = torch.empty(at_once, 1, most_seen, width)
    count_T, parts = torch.empty(at_once, dtype=torch.int32), []
    own_B1 = torch.arange(at_once + 1, dtype=torch.int32)
    seen, parameters = LayerCache(seen_TKd, seen_TKd), AttentionParameters(scale, sinks_H=sinks_H)
    for first in range(0, tokens, at_once):
        num = min(at_once, tokens - first)
        args = CopyArguments(
            runs=_runs(row_Td, history_NWd, kept),
            pool_NEd=address_of(None if entries is None else entries.pool_NEd),
            slot_TK=address_of(None if entries is None else entries.slot_TK),
            count_T=address_of(None if entries is None else entries.count_T),
            out_TKd=seen_TKd.data_ptr(),
            seen_T=count_T.data_ptr(),
            first=first,
            most=most,
            most_seen=most_seen,
            itemsize=4 if entries is None else entries.pool_NEd.itemsize,
        )
        team().run(_copy_task, num, args)
        metadata = AttentionMetadata(own_B1[: num + 1], count_T[:num], own_B1[:num, None], 1, most_seen, num)
        parts.append(paged_attention.paged_attention(q_THd[first : first + num], seen, metadata, parameters))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _contiguous(runs: TokenRuns) -> tuple[Tensor, ...]:
    """Return the tensors of the runs, which must be kept as long as their addresses are used."""
    every = runs.run_T, runs.position_T, runs.run_start_R1, runs.slot_R
    return tuple(one.contiguous() for one in every)


def _runs(rows_TC: Tensor, history_NwC: Tensor, of_runs: tuple[Tensor, ...]) -> RunArguments:
    run_T, position_T, run_start_R1, slot_R = of_runs
    return RunArguments(
        rows_TC=rows_TC.data_ptr(),
        history_NwC=history_NwC.data_ptr(),
        run_T=run_T.data_ptr(),
        position_T=position_T.data_ptr(),
        run_start_R1=run_start_R1.data_ptr(),
        slot_R=slot_R.data_ptr(),
        columns=rows_TC.shape[1],
        size=history_NwC.shape[1],
    )


@jit
def _row_at(runs: RunArguments, token: int, position: int, source_position: int) -> int:
    """Return the address of the row of the `source_position` position, at most that of the token."""
    run, source = load_i32(runs.run_T, token), token - (position - source_position)
    if source >= load_i32(runs.run_start_R1, run):
        address: int = runs.rows_TC + 4 * runs.columns * source
    else:
        address = runs.history_NwC + 4 * runs.columns * (
            load_i64(runs.slot_R, run) * runs.size + source_position % runs.size
        )
    return address


def _pool_task(args: PoolArguments, task: int, scratch: int) -> None:
    runs, rate, width, size = args.runs, args.rate, args.width, args.runs.size
    columns = runs.columns // 2
    token = load_i64(args.token_E, task)
    position = load_i64(runs.position_T, token)
    largest, total, out = scratch, scratch + 4 * width, args.entry_Ed + 4 * width * task
    first = max(0, position - size + 1)
    for c in range(width):
        store_f32(largest, c, -math.inf)
        store_f32(total, c, 0.0)
        store_f32(out, c, 0.0)
    for source_position in range(first, position + 1):
        series = width if args.overlaps and source_position > position - rate else 0
        gate = _row_at(runs, token, position, source_position) + 4 * (columns + series)
        bias = args.bias_mC + 4 * (source_position % rate * columns + series)
        for c in range(width):
            store_f32(largest, c, max(load_f32(largest, c), load_f32(gate, c) + load_f32(bias, c)))
    for source_position in range(first, position + 1):
        series = width if args.overlaps and source_position > position - rate else 0
        value = _row_at(runs, token, position, source_position) + 4 * series
        gate = value + 4 * columns
        bias = args.bias_mC + 4 * (source_position % rate * columns + series)
        for c in range(width):
            weight = math.exp(load_f32(gate, c) + load_f32(bias, c) - load_f32(largest, c))
            store_f32(total, c, load_f32(total, c) + weight)
            store_f32(out, c, load_f32(out, c) + weight * load_f32(value, c))
    for c in range(width):
        store_f32(out, c, load_f32(out, c) / load_f32(total, c))


def _copy_task(args: CopyArguments, task: int, scratch: int) -> None:
    runs, width, token = args.runs, args.runs.columns, args.first + task
    position = load_i64(runs.position_T, token)
    out = args.out_TKd + 4 * width * args.most_seen * task
    for source_position in range(max(0, position - runs.size + 1), position + 1):
        copy_row(_row_at(runs, token, position, source_position), width, out)
        out += 4 * width
    num_rows = min(runs.size, position + 1)
    count = load_i32(args.count_T, token) if args.pool_NEd else 0
    for k in range(count):
        entry = args.pool_NEd + args.itemsize * width * load_i32(args.slot_TK, token * args.most + k)
        if args.itemsize == 4:
            copy_row(entry, width, out)
        else:
            widen_row(entry, width, out)
        out += 4 * width
    store_i32(args.seen_T, task, num_rows + count)
