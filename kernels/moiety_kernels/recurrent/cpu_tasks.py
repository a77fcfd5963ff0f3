"""Shared parts of the CPU tasks of recurrent layers: the sequences' arguments, and the block of a task's state.

A task of a recurrence is one sequence's tokens in COLUMNS columns of one value head's state. T tokens, H key heads of
width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.memory import load_i32, load_i64
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import MAX_TASKS
from moiety_kernels.cpu.values import LANES, Float, Floats, Int

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

VECTORS = 4  # of a block of columns
COLUMNS = VECTORS * LANES


class SequenceArguments(NamedTuple):
    """The sequences of a batch."""

    slot_S: Address  # int64
    has_state_S: Address  # int32
    query_start_S1: Address  # int32


class RecurrenceArguments(NamedTuple):
    """Arguments that recurrences share; the tensors are float32."""

    sequences: SequenceArguments
    q_THK: Address
    k_THK: Address
    v_TMV: Address
    state_NMKV: Address
    out_TMV: Address
    q_stride: Int64  # bytes from one token to the next
    k_stride: Int64
    v_stride: Int64
    slot_stride: Int64  # bytes from one slot's state to the next
    value_heads: Int64  # M
    sharing: Int64  # M / H
    width: Int64  # K
    value_width: Int64  # V


def fits_sequences(sequences: RecurrentSequences) -> bool:
    """Return whether tasks can read these sequences."""
    return (
        sequences.has_state_S.dtype is sequences.query_start_S1.dtype is torch.int32
        and sequences.slot_S.dtype is torch.int64
    )


def fits_recurrence(
    heads: RecurrentHeads, log_decay: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> bool:
    """Return whether tasks of a recurrence support these tensors; `log_decay` of any shape."""
    return (
        fits_sequences(sequences)
        and heads.q_THK.dtype is heads.k_THK.dtype is heads.v_TMV.dtype is torch.float32
        and heads.v_TMV.shape[2] % COLUMNS == 0
        and heads.has_contiguous_tokens
        and log_decay.is_contiguous()
        and state_NMKV[0].is_contiguous()
        and 0 < num_tasks(heads, sequences) < MAX_TASKS
    )


def num_tasks(heads: RecurrentHeads, sequences: RecurrentSequences) -> int:
    """Return the number of tasks of a recurrence."""
    value_heads, value_width = heads.v_TMV.shape[1:]
    return int(sequences.slot_S.shape[0] * value_heads * (value_width // COLUMNS))


def sequence_arguments(sequences: RecurrentSequences) -> SequenceArguments:
    """Return the sequences as tasks read them."""
    return SequenceArguments(
        slot_S=sequences.slot_S.data_ptr(),
        has_state_S=sequences.has_state_S.data_ptr(),
        query_start_S1=sequences.query_start_S1.data_ptr(),
    )


def recurrence_arguments(
    heads: RecurrentHeads, state_NMKV: Tensor, out_TMV: Tensor, sequences: RecurrentSequences
) -> RecurrenceArguments:
    """Return the arguments that recurrences share."""
    q_THK, k_THK, v_TMV = heads.q_THK, heads.k_THK, heads.v_TMV
    return RecurrenceArguments(
        sequences=sequence_arguments(sequences),
        q_THK=q_THK.data_ptr(),
        k_THK=k_THK.data_ptr(),
        v_TMV=v_TMV.data_ptr(),
        state_NMKV=state_NMKV.data_ptr(),
        out_TMV=out_TMV.data_ptr(),
        q_stride=4 * q_THK.stride(0),
        k_stride=4 * k_THK.stride(0),
        v_stride=4 * v_TMV.stride(0),
        slot_stride=4 * state_NMKV.stride(0),
        value_heads=v_TMV.shape[1],
        sharing=heads.sharing,
        width=k_THK.shape[2],
        value_width=v_TMV.shape[2],
    )


def _fill(e: Emitter, value: Float, count: Int, out: Floats) -> None:
    """Emit out[i] = value."""
    values = e.splat(value)
    for i in e.loop(count, LANES):
        out[i] = values


fill = function("moiety_fill_row", _fill)


@jit
def load_sequence(args: SequenceArguments, s: int) -> tuple[int, int, int, bool]:
    """Return (first token, end, slot, whether it has a state) of sequence s."""
    begin, end = load_i32(args.query_start_S1, s), load_i32(args.query_start_S1, s + 1)
    return begin, end, load_i64(args.slot_S, s), load_i32(args.has_state_S, s) != 0


@jit
def block_of_task(args: RecurrenceArguments, task: int) -> tuple[int, int, int]:
    """Return (sequence, value head, offset of the block of columns in a row in bytes) of a task."""
    num_blocks = args.value_width // COLUMNS
    return (
        task // (args.value_heads * num_blocks),
        task // num_blocks % args.value_heads,
        4 * COLUMNS * (task % num_blocks),
    )


@jit
def clear_block(args: RecurrenceArguments, state: int) -> None:
    """Set a block of columns of a state to zero."""
    for i in range(args.width):
        fill(0.0, COLUMNS, state + i * 4 * args.value_width)
