"""Attention task with bfloat16 queries, keys, weights and values, for CPUs that multiply pairs (`cpu/panels.py`).

Scores, sums and the softmax are float32. A chunk's keys and values are packed once for all rows of the task, up to
ROWS_AT_ONCE. Positions that no row sees are packed as zeros, or as a key with masked scores, so that memory beyond a
context is never read.
"""

from __future__ import annotations

import math

from moiety_kernels.cpu import paths
from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.gemm import TASKS_PER_THREAD, UNPACKED_AT, WIDE_AT
from moiety_kernels.cpu.memory import load_f32, load_i32, store_f32, store_i64
from moiety_kernels.cpu.panels import (
    DEPTH,
    MAX_ROWS,
    PANEL,
    TOGETHER,
    add_weighted_values,
    pack_keys,
    pack_narrow_keys,
    pack_narrow_values,
    pack_values,
    score_rows,
    weigh_masked_scores,
    weigh_scores,
)
from moiety_kernels.cpu.row_packing import pack_pairs_row
from moiety_kernels.cpu.structs import struct_at
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.vectors import copy_row, fetch, scale_row
from moiety_kernels.paged_attention.cpu_arguments import (
    CHUNK,
    ITEM_BYTES,
    AttentionArguments,
    QueryRange,
    end_seen,
    lowest_seen,
)

ROWS_AT_ONCE = 128
MIN_ROWS_AT_ONCE = 32  # used where there would be too few tasks
LOG2_E = 1 / math.log(2)

_GROUP = TOGETHER * PANEL  # keys packed and scored together
_FETCH_AHEAD = 2 * PANEL  # positions; blocks are scattered, so the hardware prefetcher does not predict the next

# layout of a thread's scratch memory
_POINTERS_AT = WIDE_AT  # addresses of a panel's keys
_STATES_AT = _POINTERS_AT + 8 * PANEL  # two floats per row


def usable() -> bool:
    """Return whether the CPU multiplies pairs and has no matrix tiles, with which this path was never measured."""
    return paths.serving_path("bfloat16") is paths.PAIRS


def rows_at_once(tokens: int, heads: int) -> int:
    """Return how many rows a task takes: ROWS_AT_ONCE, halved while there would be too few tasks."""
    rows = ROWS_AT_ONCE
    while rows // 2 >= MIN_ROWS_AT_ONCE and tokens * heads < rows * TASKS_PER_THREAD * team().num_threads:
        rows //= 2
    return rows


def takes(width: int, value_width: int, sharing: int) -> bool:
    """Return whether the task supports heads of these widths, `sharing` of which share a key-value head."""
    rows = max(ROWS_AT_ONCE, sharing)
    row_bytes = 16 + 2 * width + 4 * value_width + 6 * CHUNK
    fits = _STATES_AT + rows * row_bytes + (CHUNK + 4) * 2 * (width + value_width) <= UNPACKED_AT
    return width % DEPTH == 0 and value_width % DEPTH == 0 and fits


@jit
def _row(table: int, cache: int, block_bytes: int, row_bytes: int, head: int, places: int, position: int) -> int:
    """Return the address of a position of the sequence in the key or the value cache."""
    block = cache + load_i32(table, position // places) * block_bytes
    return int(block + (head * places + position % places) * row_bytes)


@jit
def _ask(args: AttentionArguments, table: int, head: int, first: int, end: int) -> None:
    """Prefetch keys and values of the positions from `first` to `end`."""
    places, key_bytes = args.places, args.cache_itemsize * args.width
    value_bytes = args.value_stride
    while first < end:
        run = min(places - first % places, end - first)
        key = _row(table, args.k_cache_NGPd, args.key_block, key_bytes, head, places, first)
        value = _row(table, args.v_cache_NGPd, args.value_block, value_bytes, head, places, first)
        fetch(key, run * key_bytes)
        fetch(value, run * value_bytes)
        first += run


@jit
def _pack_chunk(
    args: AttentionArguments, table: int, head: int, start: int, unseen: int, count: int, end: int, pointers: int,
    keys: int, values: int, zeros: int,
) -> None:  # fmt: skip
    """Pack keys and values of `count` positions from `start` on, with padding, and prefetch the next before `end`.

    The first `unseen` positions are behind the window and packed as zeros: their blocks may have any content.
    """
    places, size, width = args.places, args.cache_itemsize, args.width
    k_cache, v_cache, key_bytes = args.k_cache_NGPd, args.v_cache_NGPd, size * width
    value_width, value_bytes, k_block, v_block = args.value_width, args.value_stride, args.key_block, args.value_block
    left, next_key, next_value, before = 0, 0, 0, zeros  # `left`: slots left in the block
    for first in range(0, (count + _GROUP - 1) // _GROUP * _GROUP, PANEL):
        ahead = start + first + _FETCH_AHEAD
        _ask(args, table, head, ahead, min(ahead + PANEL, end))
        for j in range(first, first + PANEL):
            key = value = zeros
            if unseen <= j < count:
                if left == 0:
                    next_key = _row(table, k_cache, k_block, key_bytes, head, places, start + j)
                    next_value = _row(table, v_cache, v_block, value_bytes, head, places, start + j)
                    left = places - (start + j) % places
                key, value = next_key, next_value
                next_key, next_value, left = next_key + key_bytes, next_value + value_bytes, left - 1
            store_i64(pointers, j - first, key)
            if j % 2 == 0:
                before = value
            elif size == 4:
                pack_values(before, value, value_width, values + 2 * (j - 1) * value_width)
            else:
                pack_narrow_values(before, value, value_width, values + 2 * (j - 1) * value_width)
        panel = keys + 2 * width * (first // _GROUP * _GROUP) + 4 * (first % _GROUP)
        if size == 4:
            pack_keys(pointers, width, panel)
        else:
            pack_narrow_keys(pointers, width, panel)


@jit
def _weigh(
    args: AttentionArguments, position: int, sharing: int, start: int, count: int, padded: int, num_rows: int,
    scores: int, weights: int, states: int, factors: int,
) -> None:  # fmt: skip
    """Compute masked softmax weights of a chunk's scores; `position` is the first query's."""
    factor = args.scale * LOG2_E
    for i in range(num_rows):
        seen = end_seen(args, position + i // sharing) - start
        end, first = max(0, min(count, seen)), max(0, lowest_seen(args, position + i // sharing) - start)
        score, weight, state = scores + 4 * CHUNK * i, weights + 2 * CHUNK * i, states + 8 * i
        if first > 0 or end < padded:
            weigh_masked_scores(score, padded, first, end, factor, state, weight, factors + 4 * i)
        else:
            weigh_scores(score, padded, first, end, factor, state, weight, factors + 4 * i)


@jit
def _next_rows(left: int) -> int:
    """Return how many of the remaining rows the next tile takes, so that all tiles have about the same size."""
    parts = (left + MAX_ROWS - 1) // MAX_ROWS
    return (left + parts - 1) // parts


def task(args: AttentionArguments, number: int, scratch: int) -> None:
    """Run the task of `cpu.py` in pairs: one sequence, one key-value head and some rows of queries."""
    kv_heads, width, heads = args.kv_heads, args.width, args.heads
    sharing, head, value_width = heads // kv_heads, number % kv_heads, args.value_width
    item = struct_at(QueryRange, args.items + ITEM_BYTES * (number // kv_heads))
    s, first, queries = item.sequence, item.first, item.queries
    begin, end = load_i32(args.query_start_S1, s), load_i32(args.query_start_S1, s + 1)
    position = load_i32(args.context_len_S, s) - (end - begin) + first  # of the first query here
    table = args.block_table_SB + 4 * s * args.table_width
    num_rows, sinks = queries * sharing, args.sinks_H
    pointers, states = scratch + _POINTERS_AT, scratch + _STATES_AT
    factors = states + 8 * num_rows
    zeros = (factors + 4 * num_rows + 63) // 64 * 64
    packed = zeros + 4 * (width + value_width)
    keys = packed + 2 * width * num_rows
    values = keys + 2 * width * CHUNK
    sums = values + 2 * value_width * CHUNK
    weights = sums + 4 * value_width * num_rows
    scores = weights + 2 * CHUNK * num_rows
    for i in range(width + value_width):
        store_f32(zeros, i, 0.0)
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        row = args.q_THd + token * args.q_stride + 4 * shared * width
        pack_pairs_row(row, width, packed + 2 * width * i)
        store_f32(states, 2 * i, load_f32(sinks, shared) * LOG2_E if sinks else -math.inf)  # as if included
        store_f32(states, 2 * i + 1, 1.0 if sinks else 0.0)
    for i in range(num_rows * value_width):
        store_f32(sums, i, 0.0)
    stop, lowest = end_seen(args, position + queries - 1), lowest_seen(args, position)
    for start in range(lowest // CHUNK * CHUNK, stop, CHUNK):
        count = min(CHUNK, stop - start)
        padded = (count + _GROUP - 1) // _GROUP * _GROUP
        _pack_chunk(args, table, head, start, max(0, lowest - start), count, stop, pointers, keys, values, zeros)
        i = 0
        while i < num_rows:
            step = _next_rows(num_rows - i)
            score_rows(
                num_rows=step, queries_MK=packed + 2 * width * i, query_stride=2 * width, pairs=width // 2,
                panels=keys, keys=padded, scores_MJ=scores + 4 * CHUNK * i, scores_stride=4 * CHUNK,
            )  # fmt: skip
            i += step
        _weigh(args, position, sharing, start, count, padded, num_rows, scores, weights, states, factors)
        i = 0
        while i < num_rows:
            step = _next_rows(num_rows - i)
            add_weighted_values(
                num_rows=step, weights_MJ=weights + 2 * CHUNK * i, weight_stride=2 * CHUNK, pairs=padded // 2,
                values=values, width=value_width, factors_M=factors + 4 * i, out_MD=sums + 4 * value_width * i,
            )  # fmt: skip
            i += step
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        row = sums + 4 * value_width * i
        total = load_f32(states, 2 * i + 1)
        scale_row(row, value_width, 1.0 / total if total > 0.0 else 0.0)
        if args.states_TH2:
            state = args.states_TH2 + 8 * (token * heads + shared)
            store_f32(state, 0, load_f32(states, 2 * i) / LOG2_E)
            store_f32(state, 1, total)
        copy_row(row, value_width, args.out_THd + 4 * (token * heads + shared) * value_width)
