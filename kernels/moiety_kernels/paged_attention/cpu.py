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
from typing import TYPE_CHECKING

import torch

from moiety_kernels.checks import has_contiguous_blocks
from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.gemm import ROWS_AT, TEMP_AT, multiply_narrow, multiply_wide
from moiety_kernels.cpu.memory import load_f32, load_i32, store_f32, store_i64
from moiety_kernels.cpu.structs import address_of, store_struct, struct_at
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, parallel, team
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import AXPY_ROWS, axpy_tile, fetch, scale_row, softmax_step
from moiety_kernels.paged_attention import cpu_pairs
from moiety_kernels.paged_attention.cpu_arguments import (
    CHUNK,
    ITEM_BYTES,
    AttentionArguments,
    QueryRange,
    end_seen,
    lowest_seen,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.kv_store.caches import LayerCache
    from moiety_kernels.paged_attention.inputs import AttentionMetadata, AttentionParameters

ROWS_AT_ONCE = 48
_AXPY_VECTORS = 4
_FETCH_AHEAD = 2  # blocks; they are scattered, so the hardware prefetcher does not predict the next
_MAX_SHARING = 256  # query heads per key-value head

# several rows or one, several vectors or one, of float32 or bfloat16 values
_some_several_f32, _some_one_f32 = (axpy_tile(AXPY_ROWS, vectors, widen=False) for vectors in (_AXPY_VECTORS, 1))
_one_several_f32, _one_one_f32 = (axpy_tile(1, vectors, widen=False) for vectors in (_AXPY_VECTORS, 1))
_some_several_bf16, _some_one_bf16 = (axpy_tile(AXPY_ROWS, vectors, widen=True) for vectors in (_AXPY_VECTORS, 1))
_one_several_bf16, _one_one_bf16 = (axpy_tile(1, vectors, widen=True) for vectors in (_AXPY_VECTORS, 1))


def fits(q_THd: Tensor, cache: LayerCache, block_table_SB: Tensor) -> bool:
    """Return whether `paged_attention` supports these tensors."""
    tokens, heads, width = q_THd.shape
    sharing = heads // cache.k_NGPd.shape[1]
    rows = max(ROWS_AT_ONCE, sharing)
    return (
        q_THd.dtype is torch.float32
        and cache.k_NGPd.dtype in (torch.float32, torch.bfloat16)
        and block_table_SB.dtype is torch.int32
        and width % LANES == 0
        and cache.v_NGPd.shape[3] % LANES == 0
        and sharing <= _MAX_SHARING
        and TEMP_AT + 4 * rows * (CHUNK + width + 2) <= SCRATCH_BYTES
        and 0 < tokens * heads <= MAX_TASKS
        and q_THd.stride(2) == 1
        and q_THd.stride(1) == width
        and block_table_SB.stride(1) == 1
        and has_contiguous_blocks(cache.k_NGPd)
        and _is_packed(cache.v_NGPd)
    )


def _is_packed(cache_NGPd: Tensor) -> bool:
    """Return whether a block's slots and heads are evenly spaced; the spacing of slots may exceed their width."""
    row = cache_NGPd.stride(2)
    return cache_NGPd.stride()[1:] == (cache_NGPd.shape[2] * row, row, 1)


def paged_attention(
    q_THd: Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    parameters: AttentionParameters,
    states_TH2: Tensor | None = None,
) -> Tensor:
    """Return out_THd, contiguous, as wide as a value; 0 for a query that sees no key.

    `states_TH2`, float32 and contiguous, receives the largest scaled score of each query and head, -inf if there is
    none, and the sum of the weights relative to it.
    """
    tokens, heads, width = q_THd.shape
    k_NGPd, v_NGPd, block_table_SB = cache.k_NGPd, cache.v_NGPd, metadata.block_table_SB
    _, kv_heads, places, _ = k_NGPd.shape
    sequences = metadata.context_len_S.shape[0]
    value_width, sharing = v_NGPd.shape[3], heads // kv_heads
    in_pairs = parameters.rounds and cpu_pairs.usable() and cpu_pairs.takes(width, value_width, sharing)
    rows = cpu_pairs.rows_at_once(tokens, heads) if in_pairs else ROWS_AT_ONCE
    at_once = max(1, rows // sharing)
    out_THd = torch.empty(tokens, heads, value_width)
    items = torch.empty(ITEM_BYTES // 8 * (sequences + tokens // at_once), dtype=torch.int64)
    args = AttentionArguments(
        q_THd=q_THd.data_ptr(),
        k_cache_NGPd=k_NGPd.data_ptr(),
        v_cache_NGPd=v_NGPd.data_ptr(),
        out_THd=out_THd.data_ptr(),
        query_start_S1=metadata.query_start_S1.data_ptr(),
        context_len_S=metadata.context_len_S.data_ptr(),
        block_table_SB=block_table_SB.data_ptr(),
        sequences=sequences,
        table_width=block_table_SB.stride(0),
        heads=heads,
        kv_heads=kv_heads,
        width=width,
        places=places,
        key_block=k_NGPd.itemsize * k_NGPd.stride(0),
        value_block=v_NGPd.itemsize * v_NGPd.stride(0),
        q_stride=4 * q_THd.stride(0),
        window=0 if parameters.window is None else parameters.window,
        chunked=parameters.chunked,
        items=items.data_ptr(),
        tokens_at_once=at_once,
        task=task_address(cpu_pairs.task if in_pairs else _task, AttentionArguments),
        sinks_H=address_of(parameters.sinks_H),
        value_width=value_width,
        value_stride=v_NGPd.itemsize * v_NGPd.stride(2),
        cache_itemsize=v_NGPd.itemsize,
        scale=parameters.scale,
        num_shards=metadata.num_shards,
        shard=metadata.shard,
        states_TH2=address_of(states_TH2),
    )
    team().drive(_drive, args)
    return out_THd


@jit
def _drive(state: int, scratch: int, function: int, args: int, num_tasks: int) -> None:
    """List the items (sequence, first query, number of queries), the longest contexts first, and run them."""
    attention = struct_at(AttentionArguments, args)
    starts, items, at_once = attention.query_start_S1, attention.items, attention.tokens_at_once
    num_items = 0
    for s in range(attention.sequences):
        queries = load_i32(starts, s + 1) - load_i32(starts, s)
        for first in range((queries - 1) // at_once * at_once, -1, -at_once):
            item = QueryRange(sequence=s, first=first, queries=min(at_once, queries - first))
            store_struct(items + ITEM_BYTES * num_items, item)
            num_items += 1
    if num_items:
        parallel(state, scratch, attention.task, args, num_items * attention.kv_heads)


@jit
def _scores(
    args: AttentionArguments, table: int, head: int, start: int, count: int, num_rows: int, rows: int, scores: int
) -> None:
    """Compute scores[row, j] = q_row · k[start + j] for j < count, and prefetch the values, which are needed next."""
    places, width, size, value_stride = args.places, args.width, args.cache_itemsize, args.value_stride
    stride = size * width
    cache = args.k_cache_NGPd + head * places * stride
    values = args.v_cache_NGPd + head * places * value_stride
    j = 0
    while j < count:
        block, place = (start + j) // places, (start + j) % places
        run = min(places - place, count - j)
        number = load_i32(table, block)
        key = cache + number * args.key_block + place * stride
        if j + _FETCH_AHEAD * places < count:
            fetch(cache + load_i32(table, block + _FETCH_AHEAD) * args.key_block, places * stride)
        fetch(values + number * args.value_block + place * value_stride, run * value_stride)
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
    args: AttentionArguments, table: int, head: int, start: int, first: int, count: int, num_rows: int, scores: int,
    sums: int,
) -> None:  # fmt: skip
    """Add sums[row] += Σ_j weight[row, j] · v[start + j] for first ≤ j < count."""
    places, width, stride, size = args.places, args.value_width, args.value_stride, args.cache_itemsize
    cache, row_bytes = args.v_cache_NGPd + head * places * stride, 4 * width
    vectors = width // LANES
    j = first
    while j < count:
        block, place = (start + j) // places, (start + j) % places
        run = min(places - place, count - j)
        value = cache + load_i32(table, block) * args.value_block + place * stride
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
def _mask(args: AttentionArguments, position: int, start: int, count: int, padded: int, row: int) -> None:
    """Scale a row of scores and mask the places that the query at `position` does not see."""
    scale_row(row, padded, args.scale)
    for j in range(min(count, lowest_seen(args, position) - start)):
        store_f32(row, j, -math.inf)
    for j in range(max(0, min(count, end_seen(args, position) - start)), padded):
        store_f32(row, j, -math.inf)


def _task(args: AttentionArguments, task: int, scratch: int) -> None:
    kv_heads, width, heads = args.kv_heads, args.width, args.heads
    sharing, head = heads // kv_heads, task % kv_heads
    item = struct_at(QueryRange, args.items + ITEM_BYTES * (task // kv_heads))
    s, first, queries = item.sequence, item.first, item.queries
    begin, end = load_i32(args.query_start_S1, s), load_i32(args.query_start_S1, s + 1)
    position = load_i32(args.context_len_S, s) - (end - begin) + first  # of the first query here
    table = args.block_table_SB + 4 * s * args.table_width
    num_rows, rows = queries * sharing, scratch + ROWS_AT
    scores = scratch + TEMP_AT
    sums, value_width = scores + 4 * CHUNK * num_rows, args.value_width
    states = sums + 4 * value_width * num_rows
    token_bytes, sinks = args.q_stride, args.sinks_H
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        store_i64(rows, i, args.q_THd + token * token_bytes + 4 * shared * width)
        store_f32(states, 2 * i, load_f32(sinks, shared) if sinks else -math.inf)  # as if it were already included
        store_f32(states, 2 * i + 1, 1.0 if sinks else 0.0)
    for i in range(num_rows * value_width):
        store_f32(sums, i, 0.0)
    lowest, stop = lowest_seen(args, position), end_seen(args, position + queries - 1)
    for start in range(lowest // CHUNK * CHUNK, stop, CHUNK):
        count = min(CHUNK, stop - start)
        padded = (count + LANES - 1) // LANES * LANES
        _scores(args, table, head, start, count, num_rows, rows, scores)
        for i in range(num_rows):
            row = scores + 4 * CHUNK * i
            _mask(args, position + i // sharing, start, count, padded, row)
            shrink = softmax_step(row, padded, states + 8 * i)
            if shrink != 1.0:
                scale_row(sums + 4 * value_width * i, value_width, shrink)
        first_seen = max(0, lowest - start)  # a block behind the window may be another sequence's, with any content
        _accumulate(args, table, head, start, first_seen, count, num_rows, scores, sums)
    for i in range(num_rows):
        token, shared = first + begin + i // sharing, head * sharing + i % sharing
        out = args.out_THd + 4 * (token * heads + shared) * value_width
        total = load_f32(states, 2 * i + 1)
        scale_row(sums + 4 * value_width * i, value_width, 1.0 / total if total > 0.0 else 0.0)
        if args.states_TH2:
            state = args.states_TH2 + 8 * (token * heads + shared)
            store_f32(state, 0, load_f32(states, 2 * i))
            store_f32(state, 1, total)
        for j in range(value_width):
            store_f32(out, j, load_f32(sums, i * value_width + j))
