"""The expert layer on a CPU: pairs grouped by expert, gate and up products, activation, down products, weighted sum.

T tokens, K experts per token, R = T · K routed rows in the order of their experts, E experts, D model and F expert
width. An item is one expert with up to ROW_BLOCK of its rows; a task is an item and a chunk of the expert's weight
rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit, task_address
from moiety_kernels.cpu.gemm import (
    MAX_WIDTH,
    ROW_BLOCK,
    TEMP_AT,
    is_multipliable,
    product_kind,
    stored_as,
    weight_rows,
)
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.products import Product, multiply, multiply_both
from moiety_kernels.cpu.structs import (
    Address,
    Float64,
    Int64,
    address_of,
    address_of_struct,
    size_of,
    store_struct,
    struct_at,
)
from moiety_kernels.cpu.team import MAX_TASKS, parallel, team
from moiety_kernels.cpu.unpacking import WeightArguments, weight_arguments
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import (
    add_scaled_row,
    clipped_row,
    geglu_row,
    limited_swiglu_row,
    relu2_row,
    scaled_swiglu_row,
    swiglu_row,
)
from moiety_kernels.input_order.cpu import gather_row
from moiety_kernels.low_rank import cpu as low_rank
from moiety_kernels.moe.cpu_plan import experts_plan
from moiety_kernels.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.low_rank import FeedForwardFactors
    from moiety_kernels.moe.activation import Activation

_NAMES = ("silu", "gelu_tanh", "clipped", "limited_silu", "scaled_silu", "relu2")  # the last one has no gate
_SILU, _GELU_TANH, _CLIPPED, _LIMITED_SILU, _SCALED_SILU, _RELU2 = range(len(_NAMES))
_KINDS = {name: number for number, name in enumerate(_NAMES)}
_COMBINE_BLOCK = 16  # tokens per task
ELSEWHERE = -1  # row index of a pair whose expert is on another rank


class Item(NamedTuple):
    """One expert and some of its rows."""

    expert: Int64
    first: Int64  # row
    num_rows: Int64


class CombineArguments(NamedTuple):
    """Arguments of the weighted sum over each token's rows."""

    weight_TK: Address  # float32, or 0: the sum is unweighted
    place_TK: Address  # int64 row of each pair, or ELSEWHERE
    result_RD: Address  # float32
    out_TD: Address  # float32, contiguous
    adds: Int64  # whether the sum is added to what the output holds
    tokens: Int64  # T
    top_k: Int64  # K
    width: Int64  # D


class ExpertsArguments(NamedTuple):
    """Arguments of the expert layer; everything of R rows, `starts_E` and `items` are workspace."""

    x_TD: Address  # float32
    x_stride: Int64  # bytes from one token of x to the next
    expert_TK: Address  # int32, or 0: each token uses expert 0
    w_gate_up_E2FD: WeightArguments
    w_down_EDF: WeightArguments
    gate_up_bias_E2F: Address  # float32, or 0
    down_bias_ED: Address  # float32, or 0
    experts: Int64  # E
    hidden: Int64  # F
    num_ups: Int64  # rows of an expert's first weight: gates and ups, or ups only
    up: Product
    down: Product
    up_chunk: Int64  # of F, per task
    down_chunk: Int64  # of D, per task
    activation: Int64
    limit: Float64  # of the activation
    alpha: Float64
    inner_RF: Address  # float32
    starts_E: Address  # int64: where the rows of each expert start, with one entry more
    x_row_R: Address  # int64 addresses of rows of x
    inner_row_R: Address  # int64 addresses of rows of `inner_RF`
    items: Address
    added_P2F: Address  # float32 of adapters, added to gates and ups of each of P = T · K pairs, or 0
    added_row_R: Address  # int64 addresses of rows of `added_P2F`, 0 where a token has no adapter
    slot_T: Address  # int64 adapter of each token, negative for none, or 0
    up_order_ED: Address  # int32 inputs of each expert's first weight in the order that it stores, or 0
    down_order_EF: Address  # the same of the second weight
    ordered_x_RD: Address  # float32, rows of x in these orders, if there are any
    ordered_inner_RF: Address
    order_up_task: Address
    order_down_task: Address
    up_task: Address
    down_task: Address
    combine_task: Address
    combine: CombineArguments


_ITEM_BYTES = size_of(Item)


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
        and (
            adapters is None or all(low_rank.takes(factors) for factors in (adapters.gate_up, adapters.down) if factors)
        )
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
    up_order, down_order = _order_of(w_gate_up_E2FD), _order_of(w_down_EDF)
    extra = (width if up_order is not None else 0) + (hidden if down_order is not None else 0)
    floats = torch.empty(rows * (hidden + width + extra))
    sizes = (num_experts + 1, rows, rows, rows, _ITEM_BYTES // 8 * (num_experts + rows // ROW_BLOCK), rows)
    integers = torch.empty(sum(sizes), dtype=torch.int64)
    out_TD = torch.empty(tokens, width) if onto_TD is None else onto_TD
    starts = integers.data_ptr()
    place = starts + 8 * sizes[0]
    inner = floats.data_ptr()
    num_ups, added_P2F = activation.num_inputs * hidden, None
    if adapters is not None and adapters.gate_up is not None:
        added_P2F = torch.empty(rows, num_ups)
        low_rank.spread(added_P2F, x_TD, adapters.gate_up, adapters.slot_T, expert_TK)
    up, down, up_chunk, down_chunk = experts_plan(
        (product_kind(w_gate_up_E2FD), stored_as(w_gate_up_E2FD)),
        (product_kind(w_down_EDF), stored_as(w_down_EDF)),
        (num_experts, width, hidden),
        rows,
        activation.num_inputs,
        team().num_threads,
    )
    args = ExpertsArguments(
        x_TD=x_TD.data_ptr(),
        x_stride=4 * x_TD.stride(0),
        expert_TK=address_of(expert_TK),
        w_gate_up_E2FD=weight_arguments(w_gate_up_E2FD),
        w_down_EDF=weight_arguments(w_down_EDF),
        gate_up_bias_E2F=address_of(gate_up_bias_E2F),
        down_bias_ED=address_of(down_bias_ED),
        experts=num_experts,
        hidden=hidden,
        num_ups=num_ups,
        up=up,
        down=down,
        up_chunk=up_chunk,
        down_chunk=down_chunk,
        activation=_KINDS[activation.kind],
        limit=activation.limit,
        alpha=activation.alpha,
        inner_RF=inner,
        starts_E=starts,
        x_row_R=place + 8 * rows,
        inner_row_R=place + 16 * rows,
        items=place + 24 * rows,
        added_P2F=address_of(added_P2F),
        added_row_R=starts + 8 * sum(sizes[:-1]),
        slot_T=0 if adapters is None else adapters.slot_T.data_ptr(),
        up_order_ED=address_of(up_order),
        down_order_EF=address_of(down_order),
        ordered_x_RD=inner + 4 * rows * (hidden + width),
        ordered_inner_RF=inner + 4 * rows * (width + extra),
        order_up_task=task_address(_order_up_task, ExpertsArguments),
        order_down_task=task_address(_order_down_task, ExpertsArguments),
        up_task=task_address(_up_task, ExpertsArguments),
        down_task=task_address(_down_task, ExpertsArguments),
        combine_task=task_address(_combine_task, CombineArguments),
        combine=CombineArguments(
            weight_TK=address_of(weight_TK),
            place_TK=place,
            result_RD=inner + 4 * rows * hidden,
            out_TD=out_TD.data_ptr(),
            adds=onto_TD is not None,
            tokens=tokens,
            top_k=top_k,
            width=width,
        ),
    )
    team().drive(_drive, args)
    if adapters is not None and adapters.down is not None:
        low_rank.gather(out_TD, (inner, hidden), place, adapters.down, adapters.slot_T, expert_TK, weight_TK)
    return out_TD


def _order_of(weight: Tensor | QuantizedWeight) -> Tensor | None:
    return weight.order_K if isinstance(weight, QuantizedWeight) else None


def combine(rows_RD: Tensor, weight_TK: Tensor) -> Tensor:
    """Return Σ_k weight · row for each token, summed as in `experts`; the rows are those of the pairs in order."""
    (tokens, top_k), width = weight_TK.shape, rows_RD.shape[1]
    out_TD = torch.empty(tokens, width)
    place_R = torch.arange(tokens * top_k)
    weight_TK = weight_TK.contiguous()
    args = CombineArguments(
        weight_TK=weight_TK.data_ptr(),
        place_TK=place_R.data_ptr(),
        result_RD=rows_RD.data_ptr(),
        out_TD=out_TD.data_ptr(),
        adds=0,
        tokens=tokens,
        top_k=top_k,
        width=width,
    )
    team().run(_combine_task, -(-tokens // _COMBINE_BLOCK), args)
    return out_TD


@jit
def _drive(state: int, scratch: int, function: int, args: int, num_tasks: int) -> None:
    """Group the pairs, then run the jobs in sequence."""
    layer = struct_at(ExpertsArguments, args)
    items = _group(layer)
    up_chunk, down_chunk = layer.up_chunk, layer.down_chunk
    hidden, width, tokens = layer.hidden, layer.combine.width, layer.combine.tokens
    if layer.up_order_ED:
        parallel(state, scratch, layer.order_up_task, args, items)
    parallel(state, scratch, layer.up_task, args, items * ((hidden + up_chunk - 1) // up_chunk))
    if layer.down_order_EF:
        parallel(state, scratch, layer.order_down_task, args, items)
    parallel(state, scratch, layer.down_task, args, items * ((width + down_chunk - 1) // down_chunk))
    blocks = (tokens + _COMBINE_BLOCK - 1) // _COMBINE_BLOCK
    parallel(state, scratch, layer.combine_task, address_of_struct(layer.combine), blocks)


@jit
def _group(args: ExpertsArguments) -> int:
    """Sort the pairs by expert (counting sort, stable), write row addresses and items; return the number of items."""
    experts, top_k = args.experts, args.combine.top_k
    rows = args.combine.tokens * top_k
    expert_TK, starts_E, place_TK, items = args.expert_TK, args.starts_E, args.combine.place_TK, args.items
    for e in range(experts + 1):
        store_i64(starts_E, e, 0)
    for pair in range(rows):
        e = load_i32(expert_TK, pair) if expert_TK else 0
        if e >= 0:
            store_i64(starts_E, e + 1, load_i64(starts_E, e + 1) + 1)
    num_items = 0
    for e in range(experts):
        count, first = load_i64(starts_E, e + 1), load_i64(starts_E, e)
        store_i64(starts_E, e + 1, first + count)
        for block in range(0, count, ROW_BLOCK):
            item = Item(expert=e, first=first + block, num_rows=min(ROW_BLOCK, count - block))
            store_struct(items + _ITEM_BYTES * num_items, item)
            num_items += 1
    x_TD, x_stride, x_row_R = args.x_TD, args.x_stride, args.x_row_R
    inner_RF, inner_row_R, hidden = args.inner_RF, args.inner_row_R, args.hidden
    added_P2F, added_row_R, slot_T = args.added_P2F, args.added_row_R, args.slot_T
    for pair in range(rows):
        e = load_i32(expert_TK, pair) if expert_TK else 0
        if e < 0:
            store_i64(place_TK, pair, ELSEWHERE)
            continue
        row = load_i64(starts_E, e)
        store_i64(starts_E, e, row + 1)
        store_i64(place_TK, pair, row)
        store_i64(x_row_R, row, x_TD + pair // top_k * x_stride)
        store_i64(inner_row_R, row, inner_RF + 4 * hidden * row)
        if added_P2F:
            has_slot = load_i64(slot_T, pair // top_k) >= 0
            store_i64(added_row_R, row, added_P2F + 4 * args.num_ups * pair if has_slot else 0)
    return num_items


def _order_up_task(args: ExpertsArguments, task: int, scratch: int) -> None:
    """Gather an item's rows of x in the order of its expert."""
    width, item = args.combine.width, struct_at(Item, args.items + _ITEM_BYTES * task)
    order_D, x_row_R = args.up_order_ED + 4 * width * item.expert, args.x_row_R
    for row in range(item.first, item.first + item.num_rows):
        ordered_D = args.ordered_x_RD + 4 * width * row
        gather_row(load_i64(x_row_R, row), order_D, width, ordered_D)
        store_i64(x_row_R, row, ordered_D)


def _order_down_task(args: ExpertsArguments, task: int, scratch: int) -> None:
    """Gather an item's inner rows in the order of its expert."""
    hidden, item = args.hidden, struct_at(Item, args.items + _ITEM_BYTES * task)
    order_F, inner_row_R = args.down_order_EF + 4 * hidden * item.expert, args.inner_row_R
    for row in range(item.first, item.first + item.num_rows):
        ordered_F = args.ordered_inner_RF + 4 * hidden * row
        gather_row(load_i64(inner_row_R, row), order_F, hidden, ordered_F)
        store_i64(inner_row_R, row, ordered_F)


def _up_task(args: ExpertsArguments, task: int, scratch: int) -> None:
    """Multiply an item's rows with a chunk of gates and ups, or of ups only, and apply the activation."""
    width, hidden, product, chunk = args.combine.width, args.hidden, args.up, args.up_chunk
    num_chunks = (hidden + chunk - 1) // chunk
    item = struct_at(Item, args.items + _ITEM_BYTES * (task // num_chunks))
    expert, first, num_rows = item.expert, item.first, item.num_rows
    column = task % num_chunks * chunk
    num_columns = min(chunk, hidden - column)
    w_gate_up, gate_row = args.w_gate_up_E2FD, expert * args.num_ups + column
    gate_w = weight_rows(w_gate_up, product.kind, gate_row, num_columns, width, scratch, 0)
    rows = args.x_row_R + 8 * first
    gate, up = scratch + TEMP_AT, scratch + TEMP_AT + 4 * num_rows * num_columns
    gated = args.activation != _RELU2
    if gated:
        up_w = weight_rows(w_gate_up, product.kind, gate_row + hidden, num_columns, width, scratch, num_columns)
        multiply_both(product, rows, num_rows, gate_w, up_w, num_columns, width, gate, up, 4 * num_columns, scratch)
    else:
        up = gate
        multiply(product, rows, num_rows, gate_w, num_columns, width, up, 4 * num_columns, scratch)
    bias_E2F = args.gate_up_bias_E2F
    gate_bias = bias_E2F + 4 * gate_row
    for i in range(num_rows):
        offset = 4 * i * num_columns
        if bias_E2F:
            add_scaled_row(gate + offset, gate_bias, num_columns, 1.0, gate + offset)
            if gated:
                add_scaled_row(up + offset, gate_bias + 4 * hidden, num_columns, 1.0, up + offset)
        added_2F = load_i64(args.added_row_R, first + i) if args.added_P2F else 0
        if added_2F:
            add_scaled_row(gate + offset, added_2F + 4 * column, num_columns, 1.0, gate + offset)
            if gated:
                add_scaled_row(up + offset, added_2F + 4 * (hidden + column), num_columns, 1.0, up + offset)
        inner_F = load_i64(args.inner_row_R, first + i)
        _activate(args, gate + offset, up + offset, num_columns, inner_F + 4 * column)


@jit
def _activate(args: ExpertsArguments, gate: int, up: int, num_columns: int, out: int) -> None:
    kind = args.activation
    if kind == _SILU:
        swiglu_row(gate, up, num_columns, out)
    elif kind == _GELU_TANH:
        geglu_row(gate, up, num_columns, out)
    elif kind == _LIMITED_SILU:
        limited_swiglu_row(gate, up, num_columns, out, args.limit)
    elif kind == _SCALED_SILU:
        scaled_swiglu_row(gate, up, num_columns, out, args.alpha)
    elif kind == _RELU2:
        relu2_row(up, num_columns, out)
    else:
        clipped_row(gate, up, num_columns, out, args.limit, args.alpha)


def _down_task(args: ExpertsArguments, task: int, scratch: int) -> None:
    """Multiply an item's inner rows with a chunk of the weight, and add the bias."""
    width, hidden, product, chunk = args.combine.width, args.hidden, args.down, args.down_chunk
    num_chunks = (width + chunk - 1) // chunk
    item = struct_at(Item, args.items + _ITEM_BYTES * (task // num_chunks))
    expert, first, num_rows = item.expert, item.first, item.num_rows
    column = task % num_chunks * chunk
    num_columns = min(chunk, width - column)
    w = weight_rows(args.w_down_EDF, product.kind, expert * width + column, num_columns, hidden, scratch, 0)
    out = args.combine.result_RD + 4 * (first * width + column)
    rows = args.inner_row_R + 8 * first
    multiply(product, rows, num_rows, w, num_columns, hidden, out, 4 * width, scratch)
    bias_ED = args.down_bias_ED
    if bias_ED:
        for i in range(num_rows):
            row = out + 4 * width * i
            add_scaled_row(row, bias_ED + 4 * (expert * width + column), num_columns, 1.0, row)


def _combine_task(args: CombineArguments, task: int, scratch: int) -> None:
    """Write the weighted sum of each token's rows."""
    width, top_k, tokens = args.width, args.top_k, args.tokens
    weight_TK, place_TK = args.weight_TK, args.place_TK
    for t in range(task * _COMBINE_BLOCK, min(tokens, (task + 1) * _COMBINE_BLOCK)):
        out_D = args.out_TD + 4 * t * width
        if not args.adds:
            for i in range(width):
                store_f32(out_D, i, 0.0)
        for pair in range(t * top_k, (t + 1) * top_k):
            if load_i64(place_TK, pair) == ELSEWHERE:
                continue
            row_D = args.result_RD + 4 * width * load_i64(place_TK, pair)
            add_scaled_row(out_D, row_D, width, load_f32(weight_TK, pair) if weight_TK else 1.0, out_D)
