"""The expert layer on a CPU: pairs grouped by expert, gate and up products, activation, down products, weighted sum.

T tokens, K experts per token, R = T · K routed rows in the order of their experts, E experts, D model and F expert
width. An item is one expert with up to ROW_BLOCK of its rows; a task is an item and a chunk of the expert's weight
rows.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.emitter import LANES
from moiety_kernels.cpu.gemm import (
    MAX_WIDTH,
    ROW_BLOCK,
    TEMP_AT,
    UNPACKED_AT,
    chunk_rows,
    is_multipliable,
    multiply,
    multiply_both,
    product_kind,
    weight_rows,
)
from moiety_kernels.cpu.memory import load_f32, load_f64, load_i32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.team import MAX_TASKS, parallel, team
from moiety_kernels.cpu.unpacking import format_of
from moiety_kernels.cpu.vectors import add_scaled_row, clipped_row, geglu_row, swiglu_row
from moiety_kernels.low_rank import cpu as low_rank

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.low_rank import FeedForwardFactors
    from moiety_kernels.moe.activation import Activation
    from moiety_kernels.quantization.weight import QuantizedWeight

_LAYOUT = struct.Struct("30q2d9q")
_SILU, _GELU_TANH, _CLIPPED = range(3)
_KINDS = {"silu": _SILU, "gelu_tanh": _GELU_TANH, "clipped": _CLIPPED}
_COMBINE_BLOCK = 16  # tokens per task
ELSEWHERE = -1  # row index of a pair whose expert is on another rank
_MAX_CHUNK = (UNPACKED_AT - TEMP_AT) // (2 * 4 * ROW_BLOCK) // 16 * 16

# arguments
X, WEIGHT, CHOSEN, GATE_UP, DOWN, OUT = 0, 1, 2, 3, 4, 5
TOKENS, TOP_K, EXPERTS, WIDTH, HIDDEN, X_STRIDE = 6, 7, 8, 9, 10, 11
UP_KIND, DOWN_KIND, UP_CHUNK, DOWN_CHUNK = 12, 13, 14, 15
INNER, RESULT = 16, 17  # float32 workspace [R, F] and [R, D]
STARTS, PLACE, X_ROWS, INNER_ROWS, ITEMS = 18, 19, 20, 21, 22  # int64 workspace
UP_TASK, DOWN_TASK, COMBINE_TASK = 23, 24, 25
ACTIVATION, UP_BIAS, DOWN_BIAS, ONTO, LIMIT, ALPHA = 26, 27, 28, 29, 30, 31
UP_SCALES, UP_BITS, UP_SHIFT, DOWN_SCALES, DOWN_BITS, DOWN_SHIFT = 32, 33, 34, 35, 36, 37
ADDED, ADDED_ROWS, SLOT = (
    38,
    39,
    40,
)  # adapters' additions to gates and ups: a row per pair, in order, slots


def fits(
    x_TD: Tensor,
    expert_TK: Tensor | None,
    w_gate_up_E2FD: Tensor | QuantizedWeight,
    w_down_EDF: Tensor | QuantizedWeight,
    gate_up_bias_E2F: Tensor | None,
    down_bias_ED: Tensor | None,
    adapters: FeedForwardFactors | None = None,
) -> bool:
    """Return whether `experts` supports these tensors."""
    _, width, hidden = w_down_EDF.shape
    rows = x_TD.shape[0] if expert_TK is None else expert_TK.numel()
    biases = [bias for bias in (gate_up_bias_E2F, down_bias_ED) if bias is not None]
    return (
        x_TD.dtype is torch.float32
        and is_multipliable(w_down_EDF, w_gate_up_E2FD)
        and (expert_TK is None or (expert_TK.dtype is torch.int32 and expert_TK.is_contiguous()))
        and width % LANES == 0
        and hidden % LANES == 0
        and max(width, hidden) <= MAX_WIDTH
        and 0 < rows * max(1, max(width, hidden) // 16) < MAX_TASKS * ROW_BLOCK // 2
        and x_TD.stride(1) == 1
        and all(bias.dtype is torch.float32 for bias in biases)
        and all(bias.is_contiguous() for bias in biases)
        and (adapters is None or all(low_rank.takes(one) for one in (adapters.gate_up, adapters.down) if one))
        and (adapters is None or (adapters.slot_T.dtype is torch.int64 and adapters.slot_T.is_contiguous()))
    )


def experts(
    x_TD: Tensor,
    weight_TK: Tensor | None,
    expert_TK: Tensor | None,
    w_gate_up_E2FD: Tensor | QuantizedWeight,
    w_down_EDF: Tensor | QuantizedWeight,
    activation: Activation,
    gate_up_bias_E2F: Tensor | None,
    down_bias_ED: Tensor | None,
    onto_TD: Tensor | None = None,
    adapters: FeedForwardFactors | None = None,
) -> Tensor:
    """Return Σ_k weight · expert(x) for each token.

    Without `expert` every token uses the first expert once; without `weight` the sum is unweighted. A negative number
    stands for an expert on another rank. If `onto` is given, the result is added to it and it is returned.
    """
    tokens, top_k = (x_TD.shape[0], 1) if expert_TK is None else expert_TK.shape
    num_experts, width, hidden = w_down_EDF.shape
    rows = tokens * top_k
    up, *up_format = format_of(w_gate_up_E2FD)
    down, *down_format = format_of(w_down_EDF)
    floats = torch.empty(rows * (hidden + width))
    sizes = (num_experts + 1, rows, rows, rows, 3 * (num_experts + rows // ROW_BLOCK), rows)
    integers = torch.empty(sum(sizes), dtype=torch.int64)
    out_TD = torch.empty(tokens, width) if onto_TD is None else onto_TD
    starts = integers.data_ptr()
    place = starts + 8 * sizes[0]
    inner = floats.data_ptr()
    added_P2F = None
    if adapters is not None and adapters.gate_up is not None:
        added_P2F = torch.empty(rows, 2 * hidden)
        low_rank.spread(added_P2F, x_TD, adapters.gate_up, adapters.slot_T, expert_TK)
    team().drive(
        _drive,
        _LAYOUT,
        0,
        2,
        *(*map(_address, (x_TD, weight_TK, expert_TK)), up, down, out_TD.data_ptr()),
        *(tokens, top_k, num_experts, width, hidden, 4 * x_TD.stride(0)),
        *_kinds_and_chunks(w_gate_up_E2FD, w_down_EDF, rows),
        *(inner, inner + 4 * rows * hidden),
        *(starts, place, place + 8 * rows, place + 16 * rows, place + 24 * rows),
        *map(task_address, (_up_task, _down_task, _combine_task)),
        _KINDS[activation.kind],
        *(_address(gate_up_bias_E2F), _address(down_bias_ED), onto_TD is not None),
        *(activation.limit, activation.alpha),
        *(*up_format, *down_format),
        *(_address(added_P2F), starts + 8 * sum(sizes[:-1]), 0 if adapters is None else adapters.slot_T.data_ptr()),
    )
    if adapters is not None and adapters.down is not None:
        low_rank.gather(out_TD, (inner, hidden), place, adapters.down, adapters.slot_T, expert_TK, weight_TK)
    return out_TD


def combine(rows_RD: Tensor, weight_TK: Tensor) -> Tensor:
    """Return Σ_k weight · row for each token, summed as in `experts`; the rows are those of the pairs in order."""
    (tokens, top_k), width = weight_TK.shape, rows_RD.shape[1]
    out_TD = torch.empty(tokens, width)
    place_R = torch.arange(tokens * top_k)
    weight_TK = weight_TK.contiguous()
    arguments = [0] * len(_LAYOUT.unpack(bytes(_LAYOUT.size)))
    arguments[WEIGHT], arguments[OUT], arguments[RESULT] = map(_address, (weight_TK, out_TD, rows_RD))
    arguments[PLACE], arguments[TOKENS], arguments[TOP_K], arguments[WIDTH] = place_R.data_ptr(), tokens, top_k, width
    team().run(task_address(_combine_task), -(-tokens // _COMBINE_BLOCK), _LAYOUT, *arguments)
    return out_TD


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def _kinds_and_chunks(
    w_gate_up_E2FD: Tensor | QuantizedWeight, w_down_EDF: Tensor | QuantizedWeight, rows: int
) -> tuple[int, int, int, int]:
    """Return how both products are multiplied, and how many weight rows a task of each takes."""
    num_experts, width, hidden = w_down_EDF.shape
    up_kind, down_kind = product_kind(w_gate_up_E2FD), product_kind(w_down_EDF)
    items = min(num_experts, rows)
    up_chunk = chunk_rows(w_gate_up_E2FD, hidden, rows // num_experts, items, together=2)
    down_chunk = chunk_rows(w_down_EDF, width, rows // num_experts, items)
    return up_kind, down_kind, min(up_chunk, _MAX_CHUNK), down_chunk


@jit
def _drive(state: int, scratch: int, function: int, args: int, num_tasks: int) -> None:
    """Group the pairs, then run the three jobs in sequence."""
    items = _group(args)
    up_chunk, down_chunk = load_i64(args, UP_CHUNK), load_i64(args, DOWN_CHUNK)
    hidden, width, tokens = load_i64(args, HIDDEN), load_i64(args, WIDTH), load_i64(args, TOKENS)
    parallel(state, scratch, load_i64(args, UP_TASK), args, items * ((hidden + up_chunk - 1) // up_chunk))
    parallel(state, scratch, load_i64(args, DOWN_TASK), args, items * ((width + down_chunk - 1) // down_chunk))
    blocks = (tokens + _COMBINE_BLOCK - 1) // _COMBINE_BLOCK
    parallel(state, scratch, load_i64(args, COMBINE_TASK), args, blocks)


@jit
def _group(args: int) -> int:
    """Sort the pairs by expert (counting sort, stable), write row addresses and items; return the number of items."""
    experts, top_k = load_i64(args, EXPERTS), load_i64(args, TOP_K)
    rows = load_i64(args, TOKENS) * top_k
    chosen, starts, place, items = (
        load_i64(args, CHOSEN),
        load_i64(args, STARTS),
        load_i64(args, PLACE),
        load_i64(args, ITEMS),
    )
    for e in range(experts + 1):
        store_i64(starts, e, 0)
    for pair in range(rows):
        e = load_i32(chosen, pair) if chosen else 0
        if e >= 0:
            store_i64(starts, e + 1, load_i64(starts, e + 1) + 1)
    num_items = 0
    for e in range(experts):
        count, first = load_i64(starts, e + 1), load_i64(starts, e)
        store_i64(starts, e + 1, first + count)
        for block in range(0, count, ROW_BLOCK):
            store_i64(items, 3 * num_items, e)
            store_i64(items, 3 * num_items + 1, first + block)
            store_i64(items, 3 * num_items + 2, min(ROW_BLOCK, count - block))
            num_items += 1
    x, x_stride, x_rows = load_i64(args, X), load_i64(args, X_STRIDE), load_i64(args, X_ROWS)
    inner, inner_rows, hidden = load_i64(args, INNER), load_i64(args, INNER_ROWS), load_i64(args, HIDDEN)
    added, added_rows, slots = load_i64(args, ADDED), load_i64(args, ADDED_ROWS), load_i64(args, SLOT)
    for pair in range(rows):
        e = load_i32(chosen, pair) if chosen else 0
        if e < 0:
            store_i64(place, pair, ELSEWHERE)
            continue
        row = load_i64(starts, e)
        store_i64(starts, e, row + 1)
        store_i64(place, pair, row)
        store_i64(x_rows, row, x + pair // top_k * x_stride)
        store_i64(inner_rows, row, inner + 4 * hidden * row)
        if added:
            store_i64(added_rows, row, added + 8 * hidden * pair if load_i64(slots, pair // top_k) >= 0 else 0)
    return num_items


def _up_task(args: int, task: int, scratch: int) -> None:
    width, hidden, kind = load_i64(args, WIDTH), load_i64(args, HIDDEN), load_i64(args, UP_KIND)
    chunk = load_i64(args, UP_CHUNK)
    num_chunks = (hidden + chunk - 1) // chunk
    item = load_i64(args, ITEMS) + 24 * (task // num_chunks)
    expert, first, num_rows = load_i64(item, 0), load_i64(item, 1), load_i64(item, 2)
    column = task % num_chunks * chunk
    num_columns = min(chunk, hidden - column)
    gate_w = _weight(args, GATE_UP, UP_SCALES, kind, expert * 2 * hidden + column, num_columns, width, scratch, 0)
    rows = load_i64(args, X_ROWS) + 8 * first
    gate, up = scratch + TEMP_AT, scratch + TEMP_AT + 4 * num_rows * num_columns
    up_w = _weight(
        args, GATE_UP, UP_SCALES, kind, expert * 2 * hidden + hidden + column, num_columns, width, scratch, num_columns
    )
    multiply_both(rows, num_rows, gate_w, up_w, kind, num_columns, width, gate, up, 4 * num_columns, scratch)
    bias = load_i64(args, UP_BIAS)
    gate_bias = bias + 4 * (expert * 2 * hidden + column)
    for i in range(num_rows):
        offset = 4 * i * num_columns
        if bias:
            add_scaled_row(gate + offset, gate_bias, num_columns, 1.0, gate + offset)
            add_scaled_row(up + offset, gate_bias + 4 * hidden, num_columns, 1.0, up + offset)
        added = load_i64(load_i64(args, ADDED_ROWS), first + i) if load_i64(args, ADDED) else 0
        if added:
            add_scaled_row(gate + offset, added + 4 * column, num_columns, 1.0, gate + offset)
            add_scaled_row(up + offset, added + 4 * (hidden + column), num_columns, 1.0, up + offset)
        _activate(
            args, gate + offset, up + offset, num_columns, load_i64(load_i64(args, INNER_ROWS), first + i), column
        )


@jit
def _weight(
    args: int, at: int, scales_at: int, kind: int, first: int, num_rows: int, k: int, scratch: int, after: int
) -> int:
    """Return rows in the form that `multiply` takes, placed after `after` others."""
    return weight_rows(
        load_i64(args, at), load_i64(args, scales_at), load_i64(args, scales_at + 1), load_i64(args, scales_at + 2),
        kind, first, num_rows, k, scratch, after,
    )  # fmt: skip


@jit
def _activate(args: int, gate: int, up: int, num_columns: int, inner_row: int, column: int) -> None:
    kind, out = load_i64(args, ACTIVATION), inner_row + 4 * column
    if kind == _SILU:
        swiglu_row(gate, up, num_columns, out)
    elif kind == _GELU_TANH:
        geglu_row(gate, up, num_columns, out)
    else:
        clipped_row(gate, up, num_columns, out, load_f64(args, LIMIT), load_f64(args, ALPHA))


def _down_task(args: int, task: int, scratch: int) -> None:
    width, hidden, kind = load_i64(args, WIDTH), load_i64(args, HIDDEN), load_i64(args, DOWN_KIND)
    chunk = load_i64(args, DOWN_CHUNK)
    num_chunks = (width + chunk - 1) // chunk
    item = load_i64(args, ITEMS) + 24 * (task // num_chunks)
    expert, first, num_rows = load_i64(item, 0), load_i64(item, 1), load_i64(item, 2)
    column = task % num_chunks * chunk
    num_columns = min(chunk, width - column)
    w = _weight(args, DOWN, DOWN_SCALES, kind, expert * width + column, num_columns, hidden, scratch, 0)
    out = load_i64(args, RESULT) + 4 * (first * width + column)
    rows = load_i64(args, INNER_ROWS) + 8 * first
    multiply(rows, num_rows, w, kind, num_columns, hidden, out, 4 * width, scratch)
    bias = load_i64(args, DOWN_BIAS)
    if bias:
        for i in range(num_rows):
            row = out + 4 * width * i
            add_scaled_row(row, bias + 4 * (expert * width + column), num_columns, 1.0, row)


def _combine_task(args: int, task: int, scratch: int) -> None:
    width, top_k, tokens = load_i64(args, WIDTH), load_i64(args, TOP_K), load_i64(args, TOKENS)
    weights, place = load_i64(args, WEIGHT), load_i64(args, PLACE)
    for t in range(task * _COMBINE_BLOCK, min(tokens, (task + 1) * _COMBINE_BLOCK)):
        out = load_i64(args, OUT) + 4 * t * width
        if not load_i64(args, ONTO):
            for i in range(width):
                store_f32(out, i, 0.0)
        for pair in range(t * top_k, (t + 1) * top_k):
            if load_i64(place, pair) == ELSEWHERE:
                continue
            row = load_i64(args, RESULT) + 4 * width * load_i64(place, pair)
            add_scaled_row(out, row, width, load_f32(weights, pair) if weights else 1.0, out)
