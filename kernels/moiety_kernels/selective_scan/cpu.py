"""Selective scan on a CPU, token by token; a task is one sequence's tokens in some channels.

T tokens, C channels, N rows of the state, L slots, S sequences.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.values import LANES, Floats, Int
from moiety_kernels.cpu.vectors import over_one_plus_exp
from moiety_kernels.recurrent.cpu_tasks import (
    SequenceArguments,
    fill,
    fits_sequences,
    load_sequence,
    sequence_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentSequences
    from moiety_kernels.selective_scan.inputs import ScanInputs

_CHANNELS = 64  # per task
_SOFTPLUS_IS_LINEAR = 20.0


class SelectiveScanArguments(NamedTuple):
    """Arguments of the scan; the tensors are float32."""

    sequences: SequenceArguments
    x_TC: Address
    step_TC: Address
    gate_TC: Address
    write_TN: Address
    read_TN: Address
    rate_NC: Address
    step_bias_C: Address
    skip_C: Address
    state_LNC: Address
    out_TC: Address
    x_stride: Int64  # bytes from one token to the next
    step_stride: Int64
    gate_stride: Int64
    write_stride: Int64
    read_stride: Int64
    slot_stride: Int64  # bytes from one slot's state to the next
    channels: Int64  # C
    rows: Int64  # N


def fits(
    inputs: ScanInputs,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> bool:
    """Return whether `selective_scan` supports these tensors."""
    channels = inputs.x_TC.shape[1]
    return (
        all(one.dtype is torch.float32 and one.stride(1) == 1 for one in inputs.of_tokens)
        and fits_sequences(sequences)
        and channels % LANES == 0
        and all(one.is_contiguous() for one in (*inputs.weights, state_LNC[0]))
        and 0 < _num_tasks(channels, sequences) < MAX_TASKS
    )


def selective_scan(
    inputs: ScanInputs,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> Tensor:
    """Return out_TC, contiguous, and replace the states."""
    out_TC, channels = inputs.x_TC.new_empty(inputs.x_TC.shape), inputs.x_TC.shape[1]
    args = SelectiveScanArguments(
        sequences=sequence_arguments(sequences),
        x_TC=inputs.x_TC.data_ptr(),
        step_TC=inputs.step_TC.data_ptr(),
        gate_TC=inputs.gate_TC.data_ptr(),
        write_TN=inputs.write_TN.data_ptr(),
        read_TN=inputs.read_TN.data_ptr(),
        rate_NC=inputs.rate_NC.data_ptr(),
        step_bias_C=inputs.step_bias_C.data_ptr(),
        skip_C=inputs.skip_C.data_ptr(),
        state_LNC=state_LNC.data_ptr(),
        out_TC=out_TC.data_ptr(),
        x_stride=4 * inputs.x_TC.stride(0),
        step_stride=4 * inputs.step_TC.stride(0),
        gate_stride=4 * inputs.gate_TC.stride(0),
        write_stride=4 * inputs.write_TN.stride(0),
        read_stride=4 * inputs.read_TN.stride(0),
        slot_stride=4 * state_LNC.stride(0),
        channels=channels,
        rows=inputs.rate_NC.shape[0],
    )
    team().run(_task, _num_tasks(channels, sequences), args)
    return out_TC


def _num_tasks(channels: int, sequences: RecurrentSequences) -> int:
    return int(sequences.slot_S.shape[0]) * -(-channels // _CHANNELS)


class ScanStepArguments(NamedTuple):
    """Arguments of one token's step in one vector of channels."""

    state_NC: Floats
    rate_NC: Floats
    stride: Int  # bytes from one row of the state, and of the rates, to the next
    rows: Int  # N
    step_C: Floats
    x_C: Floats
    gate_C: Floats
    skip_C: Floats
    write_N: Floats
    read_N: Floats
    out_C: Floats


def _step(e: Emitter, args: ScanStepArguments) -> None:
    """Emit S ← e^(step · rate) · S + write ⊗ (step · x) and out = (Sᵀ read + skip · x) · silu(gate)."""
    step, x, outs = args.step_C[0], args.x_C[0], [e.constant(0.0)]
    added = step * x
    for i in e.loop(args.rows, 1, outs):
        state, rates = args.state_NC.moved(args.stride * i), args.rate_NC.moved(args.stride * i)
        decay = e.exp(step * rates[0])
        value = e.fma(e.splat(args.write_N.scalar(i)), added, state[0] * decay)
        state[0] = value
        outs[0] = e.fma(value, e.splat(args.read_N.scalar(i)), outs[0])
    gate = args.gate_C[0]
    args.out_C[0] = e.fma(args.skip_C[0], x, outs[0]) * over_one_plus_exp(e, gate, gate)


scan_step = function("moiety_scan_step", _step)


def _task(args: SelectiveScanArguments, task: int, scratch: int) -> None:
    channels, rows = args.channels, args.rows
    num_blocks = (channels + _CHANNELS - 1) // _CHANNELS
    s, first = task // num_blocks, task % num_blocks * _CHANNELS
    count, row_bytes = min(_CHANNELS, channels - first), 4 * channels
    begin, end, slot, has_state = load_sequence(args.sequences, s)
    if begin == end:
        return
    state = args.state_LNC + slot * args.slot_stride + 4 * first
    if not has_state:
        for i in range(rows):
            fill(0.0, count, state + i * row_bytes)
    bias = args.step_bias_C + 4 * first
    for t in range(begin, end):
        raw = args.step_TC + t * args.step_stride + 4 * first
        for c in range(count):
            step = load_f32(raw, c) + load_f32(bias, c)
            store_f32(scratch, c, step if step > _SOFTPLUS_IS_LINEAR else math.log1p(math.exp(step)))
        for column in range(0, 4 * count, 4 * LANES):
            own = 4 * first + column
            scan_step(
                state_NC=state + column,
                rate_NC=args.rate_NC + own,
                stride=row_bytes,
                rows=rows,
                step_C=scratch + column,
                x_C=args.x_TC + t * args.x_stride + own,
                gate_C=args.gate_TC + t * args.gate_stride + own,
                skip_C=args.skip_C + own,
                write_N=args.write_TN + t * args.write_stride,
                read_N=args.read_TN + t * args.read_stride,
                out_C=args.out_TC + t * row_bytes + own,
            )
