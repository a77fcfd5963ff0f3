"""Attention over the paged cache on a CPU, in the manner of FlashAttention; keys and values are read in place.

They are float32, or bfloat16 and widened in registers. With `rounds`, keys, values, queries and weights are rounded to
bfloat16 where the CPU multiplies that in pairs (`cpu_pairs.py`).

A task is one sequence, one key-value head and up to ROWS_AT_ONCE query rows (tokens × the heads that share that head).
It processes the keys in chunks at fixed positions and keeps a running softmax for each row, so that a row's result does
not depend on how the prompt is chunked or on the rest of the batch.

T tokens, S sequences, B blocks per row, H query heads, G key-value heads, d head width, N blocks, P slots per block.
"""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.gemm import ROWS_AT, TEMP_AT, multiply_narrow, multiply_wide
from moiety_kernels.cpu.memory import load_f32, load_f64, load_i32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, parallel, team
from moiety_kernels.cpu.vectors import AXPY_ROWS, axpy_tile, fetch, scale_row, softmax_step
from moiety_kernels.paged_attention import cpu_pairs
from moiety_kernels.paged_attention.cpu_arguments import (
    CHUNK,
    CONTEXT_LEN,
    HEADS,
    ITEMS,
    K_CACHE,
    KV_HEADS,
    OUT,
    PLACES,
    Q_STRIDE,
    QUERY_START,
    SCALE,
    SEQUENCES,
    SINKS,
    SIZE,
    TABLE,
    TABLE_WIDTH,
    TASK,
    TOKENS_AT_ONCE,
    V_CACHE,
    VALUE_STRIDE,
    VALUE_WIDTH,
    WIDTH,
    WINDOW,
    Q,
)

if TYPE_CHECKING:
    from torch import Tensor

ROWS_AT_ONCE = 48
_LAYOUT = struct.Struct("22qd")
_AXPY_VECTORS = 4
_FETCH_AHEAD = 2  # blocks; they are scattered, so the hardware prefetcher does not predict the next
_MAX_SHARING = 256  # query heads per key-value head

# several rows or one, several vectors or one, of float32 or bfloat16 values
_some_several_f32, _some_one_f32 = (axpy_tile(AXPY_ROWS, vectors, widen=False) for vectors in (_AXPY_VECTORS, 1))
_one_several_f32, _one_one_f32 = (axpy_tile(1, vectors, widen=False) for vectors in (_AXPY_VECTORS, 1))
_some_several_bf16, _some_one_bf16 = (axpy_tile(AXPY_ROWS, vectors, widen=True) for vectors in (_AXPY_VECTORS, 1))
_one_several_bf16, _one_one_bf16 = (axpy_tile(1, vectors, widen=True) for vectors in (_AXPY_VECTORS, 1))


def fits(q_THd: Tensor, k_cache_NGPd: Tensor, v_cache_NGPd: Tensor, block_table_SB: Tensor) -> bool:
    """Return whether `paged_attention` supports these tensors."""
    tokens, heads, width = q_THd.shape
    sharing = heads // k_cache_NGPd.shape[1]
    rows = max(ROWS_AT_ONCE, sharing)
    return (
        q_THd.dtype is torch.float32
        and k_cache_NGPd.dtype in (torch.float32, torch.bfloat16)
        and block_table_SB.dtype is torch.int32
        and width % LANES == 0
        and v_cache_NGPd.shape[3] % LANES == 0
        and sharing <= _MAX_SHARING
        and TEMP_AT + 4 * rows * (CHUNK + width + 2) <= SCRATCH_BYTES
        and 0 < tokens * heads <= MAX_TASKS
        and q_THd.stride(2) == 1
        and q_THd.stride(1) == width
        and block_table_SB.stride(1) == 1
        and k_cache_NGPd.is_contiguous()
        and _is_packed(v_cache_NGPd)
    )


def _is_packed(cache_NGPd: Tensor) -> bool:
    """Return whether slots, heads and blocks are evenly spaced; the spacing of slots may exceed their width."""
    _, heads, places, _ = cache_NGPd.shape
    row = cache_NGPd.stride(2)
    return cache_NGPd.stride() == (heads * places * row, places * row, row, 1)


def paged_attention(
    q_THd: Tensor,
    k_cache_NGPd: Tensor,
    v_cache_NGPd: Tensor,
    query_start_S1: Tensor,
    context_len_S: Tensor,
    block_table_SB: Tensor,
    scale: float,
    window: int | None,
    sinks_H: Tensor | None = None,
    *,
    rounds: bool = False,
) -> Tensor:
    """Return out_THd, contiguous, as wide as a value."""
    tokens, heads, width = q_THd.shape
    _, kv_heads, places, _ = k_cache_NGPd.shape
    sequences = context_len_S.shape[0]
    value_width, sharing = v_cache_NGPd.shape[3], heads // kv_heads
    in_pairs = rounds and cpu_pairs.usable() and cpu_pairs.takes(width, value_width, sharing)
    rows = cpu_pairs.rows_at_once(tokens, heads) if in_pairs else ROWS_AT_ONCE
    at_once = max(1, rows // sharing)
    out_THd = torch.empty(tokens, heads, value_width)
    items = torch.empty(3 * (sequences + tokens // at_once), dtype=torch.int64)
    team().drive(
        _drive,
        _LAYOUT,
        0,
        2,
        q_THd.data_ptr(),
        k_cache_NGPd.data_ptr(),
        v_cache_NGPd.data_ptr(),
        out_THd.data_ptr(),
        query_start_S1.data_ptr(),
        context_len_S.data_ptr(),
        block_table_SB.data_ptr(),
        sequences,
        block_table_SB.stride(0),
        heads,
        kv_heads,
        width,
        places,
        4 * q_THd.stride(0),
        0 if window is None else window,
        items.data_ptr(),
        at_once,
        task_address(cpu_pairs.task if in_pairs else _task),
        0 if sinks_H is None else sinks_H.data_ptr(),
        value_width,
        v_cache_NGPd.itemsize * v_cache_NGPd.stride(2),
        v_cache_NGPd.itemsize,
        scale,
    )
    return out_THd


@jit
def _drive(state: int, scratch: int, function: int, args: int, num_tasks: int) -> None:
    """List the items (sequence, first query, number of queries), the longest contexts first, and run them."""
    starts, items, at_once = load_i64(args, QUERY_START), load_i64(args, ITEMS), load_i64(args, TOKENS_AT_ONCE)
    num_items = 0
    for s in range(load_i64(args, SEQUENCES)):
        queries = load_i32(starts, s + 1) - load_i32(starts, s)
        for first in range((queries - 1) // at_once * at_once, -1, -at_once):
            store_i64(items, 3 * num_items, s)
            store_i64(items, 3 * num_items + 1, first)
            store_i64(items, 3 * num_items + 2, min(at_once, queries - first))
            num_items += 1
    if num_items:
        parallel(state, scratch, load_i64(args, TASK), args, num_items * load_i64(args, KV_HEADS))


@jit
def _scores(args: int, table: int, head: int, start: int, count: int, num_rows: int, rows: int, scores: int) -> None:
    """Compute scores[row, j] = q_row · k[start + j] for j < count, and prefetch the values, which are needed next."""
    places, width, kv_heads = load_i64(args, PLACES), load_i64(args, WIDTH), load_i64(args, KV_HEADS)
    cache, values = load_i64(args, K_CACHE), load_i64(args, V_CACHE)
    size, value_stride = load_i64(args, SIZE), load_i64(args, VALUE_STRIDE)
    stride = size * width
    j = 0
    while j < count:
        block, place = (start + j) // places, (start + j) % places
        run = min(places - place, count - j)
        slot = (load_i32(table, block) * kv_heads + head) * places + place
        key = cache + slot * stride
        if j + _FETCH_AHEAD * places < count:
            ahead = (load_i32(table, block + _FETCH_AHEAD) * kv_heads + head) * places * stride
            fetch(cache + ahead, places * stride)
        fetch(values + slot * value_stride, run * value_stride)
        if size == 4:
            multiply_wide(rows, num_rows, key, stride, run, width, scores + 4 * j, 4 * CHUNK)
        else:
            multiply_narrow(rows, num_rows, key, run, width, scores + 4 * j, 4 * CHUNK)
        j += run


@jit
def _add(
    size: int, rows: int, vectors: int, weight: int, value: int, stride: int, run: int, out: int, out_stride: int
) -> None:
    """Add `run` weighted values to `rows` rows, `vectors` vectors wide."""
    if size == 4 and rows > 1:
        if vectors > 1:
            _some_several_f32(weight, 4 * CHUNK, value, stride, run, out, out_stride)
        else:
            _some_one_f32(weight, 4 * CHUNK, value, stride, run, out, out_stride)
    elif size == 4:
        if vectors > 1:
            _one_several_f32(weight, 4 * CHUNK, value, stride, run, out, out_stride)
        else:
            _one_one_f32(weight, 4 * CHUNK, value, stride, run, out, out_stride)
    elif rows > 1:
        if vectors > 1:
            _some_several_bf16(weight, 4 * CHUNK, value, stride, run, out, out_stride)
        else:
            _some_one_bf16(weight, 4 * CHUNK, value, stride, run, out, out_stride)
    elif vectors > 1:
        _one_several_bf16(weight, 4 * CHUNK, value, stride, run, out, out_stride)
    else:
        _one_one_bf16(weight, 4 * CHUNK, value, stride, run, out, out_stride)


@jit
def _accumulate(
    args: int, table: int, head: int, start: int, count: int, num_rows: int, scores: int, sums: int
) -> None:
    """Add sums[row] += Σ_j weight[row, j] · v[start + j] for j < count."""
    places, width, kv_heads = load_i64(args, PLACES), load_i64(args, VALUE_WIDTH), load_i64(args, KV_HEADS)
    cache, stride, size, row_bytes = (
        load_i64(args, V_CACHE),
        load_i64(args, VALUE_STRIDE),
        load_i64(args, SIZE),
        4 * width,
    )
    vectors = width // LANES
    j = 0
    while j < count:
        block, place = (start + j) // places, (start + j) % places
        run = min(places - place, count - j)
        value = cache + ((load_i32(table, block) * kv_heads + head) * places + place) * stride
        i = 0
        while i < num_rows:
            step = AXPY_ROWS if num_rows - i >= AXPY_ROWS else 1
            weight, target, n = scores + 4 * (i * CHUNK + j), sums + i * row_bytes, 0
            while n < vectors:
                several = _AXPY_VECTORS if vectors - n >= _AXPY_VECTORS else 1
                first, out = value + size * LANES * n, target + 4 * LANES * n
                _add(size, step, several, weight, first, stride, run, out, row_bytes)
                n += several
            i += step
        j += run


@jit
def _mask(args: int, position: int, start: int, count: int, padded: int, row: int) -> None:
    """Scale a row of scores and mask the positions that the query at `position` does not see."""
    scale_row(row, padded, load_f64(args, SCALE))
    window = load_i64(args, WINDOW)
    if window:
        for j in range(min(count, position - window + 1 - start)):
            store_f32(row, j, -math.inf)
    for j in range(max(0, min(count, position + 1 - start)), padded):
        store_f32(row, j, -math.inf)


def _task(args: int, task: int, scratch: int) -> None:
    kv_heads, width, heads = load_i64(args, KV_HEADS), load_i64(args, WIDTH), load_i64(args, HEADS)
    sharing, head = heads // kv_heads, task % kv_heads
    item = load_i64(args, ITEMS) + 24 * (task // kv_heads)
    s, first, queries = load_i64(item, 0), load_i64(item, 1), load_i64(item, 2)
    begin, end = load_i32(load_i64(args, QUERY_START), s), load_i32(load_i64(args, QUERY_START), s + 1)
    position = load_i32(load_i64(args, CONTEXT_LEN), s) - (end - begin) + first  # of the first query here
    table = load_i64(args, TABLE) + 4 * s * load_i64(args, TABLE_WIDTH)
    num_rows, rows = queries * sharing, scratch + ROWS_AT
    scores = scratch + TEMP_AT
    sums, value_width = scores + 4 * CHUNK * num_rows, load_i64(args, VALUE_WIDTH)
    states = sums + 4 * value_width * num_rows
    token_bytes, sinks = load_i64(args, Q_STRIDE), load_i64(args, SINKS)
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        store_i64(rows, i, load_i64(args, Q) + token * token_bytes + 4 * shared * width)
        store_f32(states, 2 * i, load_f32(sinks, shared) if sinks else -math.inf)  # as if it were already included
        store_f32(states, 2 * i + 1, 1.0 if sinks else 0.0)
    for i in range(num_rows * value_width):
        store_f32(sums, i, 0.0)
    window = load_i64(args, WINDOW)
    lowest = max(0, position - window + 1) if window else 0
    for start in range(lowest // CHUNK * CHUNK, position + queries, CHUNK):
        count = min(CHUNK, position + queries - start)
        padded = (count + LANES - 1) // LANES * LANES
        _scores(args, table, head, start, count, num_rows, rows, scores)
        for i in range(num_rows):
            row = scores + 4 * CHUNK * i
            _mask(args, position + i // sharing, start, count, padded, row)
            shrink = softmax_step(row, padded, states + 8 * i)
            if shrink != 1.0:
                scale_row(sums + 4 * value_width * i, value_width, shrink)
        _accumulate(args, table, head, start, count, num_rows, scores, sums)
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        out = load_i64(args, OUT) + 4 * (token * heads + shared) * value_width
        scale_row(sums + 4 * value_width * i, value_width, 1.0 / load_f32(states, 2 * i + 1))
        for j in range(value_width):
            store_f32(out, j, load_f32(sums, i * value_width + j))
