"""Causal depthwise convolution on a CPU: float32 rows; a task is one sequence's tokens in some channels.

A token's sum is always added from the oldest tap to the newest, so its bits depend neither on other sequences nor on
how its sequence is cut into chunks. T tokens, C channels, W taps, w = W - 1, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.structs import Address, Int64, address_of
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.values import LANES, Floats, Int
from moiety_kernels.cpu.vectors import copy_row, over_one_plus_exp
from moiety_kernels.recurrent.cpu_tasks import (
    SequenceArguments,
    fits_sequences,
    load_sequence,
    sequence_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.causal_conv.weights import CausalConvWeights
    from moiety_kernels.recurrent.inputs import RecurrentSequences

_CHANNELS = 512  # per task
MAX_TAPS = 8


class CausalConvArguments(NamedTuple):
    """Arguments of the convolution; the tensors are float32."""

    x_TC: Address
    weight_WC: Address
    bias_C: Address  # or 0
    tail_NwC: Address
    out_TC: Address
    sequences: SequenceArguments
    x_stride: Int64  # bytes from one row of x to the next
    slot_stride: Int64  # bytes from one slot's tail to the next
    channels: Int64  # C
    taps: Int64  # W
    silu: Int64


def fits(x_TC: Tensor, weights: CausalConvWeights, tail_NwC: Tensor, sequences: RecurrentSequences) -> bool:
    """Return whether `causal_conv` supports these tensors."""
    channels, weight_WC, bias_C = x_TC.shape[1], weights.weight_WC, weights.bias_C
    return (
        all(one.dtype is torch.float32 for one in (x_TC, weight_WC, tail_NwC))
        and (bias_C is None or (bias_C.dtype is torch.float32 and bias_C.is_contiguous()))
        and fits_sequences(sequences)
        and channels % LANES == 0
        and x_TC.stride(1) == 1
        and weight_WC.is_contiguous()
        and tail_NwC[0].is_contiguous()
        and weight_WC.shape[0] <= MAX_TAPS
        and 0 < sequences.slot_S.shape[0] * -(-channels // _CHANNELS) < MAX_TASKS
    )


def causal_conv(x_TC: Tensor, weights: CausalConvWeights, tail_NwC: Tensor, sequences: RecurrentSequences) -> Tensor:
    """Return out_TC, contiguous, and replace the tails."""
    out_TC = x_TC.new_empty(x_TC.shape)
    channels = x_TC.shape[1]
    args = CausalConvArguments(
        x_TC=x_TC.data_ptr(),
        weight_WC=weights.weight_WC.data_ptr(),
        bias_C=address_of(weights.bias_C),
        tail_NwC=tail_NwC.data_ptr(),
        out_TC=out_TC.data_ptr(),
        sequences=sequence_arguments(sequences),
        x_stride=4 * x_TC.stride(0),
        slot_stride=4 * tail_NwC.stride(0),
        channels=channels,
        taps=weights.weight_WC.shape[0],
        silu=weights.silu,
    )
    team().run(_task, sequences.slot_S.shape[0] * -(-channels // _CHANNELS), args)
    return out_TC


def _multiply_first(e: Emitter, x: Floats, weight: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = x[i] · weight[i]."""
    for i in e.loop(count, LANES):
        out[i] = x[i] * weight[i]


def _add_products(e: Emitter, x: Floats, weight: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] += x[i] · weight[i]."""
    for i in e.loop(count, LANES):
        out[i] = e.fma(x[i], weight[i], out[i])


def _add(e: Emitter, x: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] += x[i]."""
    for i in e.loop(count, LANES):
        out[i] = out[i] + x[i]


def _silu(e: Emitter, row: Floats, count: Int) -> None:
    """Emit row[i] = silu(row[i])."""
    for i in e.loop(count, LANES):
        values = row[i]
        row[i] = over_one_plus_exp(e, values, values)


def _clear(e: Emitter, count: Int, out: Floats) -> None:
    """Emit out[i] = 0."""
    for i in e.loop(count, LANES):
        out[i] = e.constant(0.0)


multiply_first = function("moiety_conv_first", _multiply_first)
add_products = function("moiety_conv_add", _add_products)
add_row = function("moiety_add_row", _add)
silu_row = function("moiety_silu", _silu)
clear_row = function("moiety_clear_row", _clear)


def _task(args: CausalConvArguments, task: int, scratch: int) -> None:
    channels, taps, x_stride = args.channels, args.taps, args.x_stride
    num_parts = (channels + _CHANNELS - 1) // _CHANNELS
    s, first = task // num_parts, task % num_parts * _CHANNELS
    count, row_bytes = min(_CHANNELS, channels - first), 4 * channels
    begin, end, slot, has_state = load_sequence(args.sequences, s)
    if begin == end:
        return
    x = args.x_TC + 4 * first
    tail = args.tail_NwC + slot * args.slot_stride + 4 * first
    if not has_state:
        for place in range(taps - 1):
            clear_row(count, tail + place * row_bytes)
    for t in range(begin, end):
        out = args.out_TC + t * row_bytes + 4 * first
        for tap in range(taps):
            source = t - taps + 1 + tap
            row = x + source * x_stride if source >= begin else tail + (source - begin + taps - 1) * row_bytes
            weight = args.weight_WC + tap * row_bytes + 4 * first
            if tap == 0:
                multiply_first(row, weight, count, out)
            else:
                add_products(row, weight, count, out)
        if args.bias_C:
            add_row(args.bias_C + 4 * first, count, out)
        if args.silu:
            silu_row(out, count)
    for place in range(taps - 1):  # each row comes from a later place of the tail, or from x
        source = end - taps + 1 + place
        row = x + source * x_stride if source >= begin else tail + (source - begin + taps - 1) * row_bytes
        copy_row(row, count, tail + place * row_bytes)
