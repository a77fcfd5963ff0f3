"""Linear attention with a decaying state on a CPU, token by token, as `gated_delta` has it.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.memory import load_f32
from moiety_kernels.cpu.structs import Address
from moiety_kernels.cpu.team import team
from moiety_kernels.cpu.values import LANES, Float, Floats, Int
from moiety_kernels.recurrent.cpu_tasks import (
    VECTORS,
    RecurrenceArguments,
    block_of_task,
    clear_block,
    fits_recurrence,
    load_sequence,
    num_tasks,
    recurrence_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences


class LinearAttentionArguments(NamedTuple):
    """Arguments of the recurrence; the tensors are float32."""

    recurrence: RecurrenceArguments
    log_decay_TM: Address


fits = fits_recurrence
_NEAR_ONE = -0.5  # gates above it have a decay near 1


def linear_attention(
    heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    out_TMV = heads.v_TMV.new_empty(heads.v_TMV.shape)
    shared = recurrence_arguments(heads, state_NMKV, out_TMV, sequences)
    team().run(_task, num_tasks(heads, sequences), LinearAttentionArguments(shared, log_decay_TM.data_ptr()))
    return out_TMV


class DecayingStepArguments(NamedTuple):
    """Arguments of one token's step in a block of columns of the state."""

    state_KV: Floats
    state_stride: Int
    kept: Float  # 1 or 0, times the state
    added: Float  # what is added to it, times the state
    k_K: Floats
    q_K: Floats
    width: Int  # K
    v_V: Floats
    out_V: Floats


def _step(e: Emitter, args: DecayingStepArguments, *, vectors: int) -> None:
    """Emit S ← kept · S + (added · S + k ⊗ v) and out = Sᵀ q for `vectors` vectors of columns.

    `kept` + `added` is the decay.
    """
    columns, kept, added = [LANES * n for n in range(vectors)], e.splat(args.kept), e.splat(args.added)
    values, outs = [args.v_V[column] for column in columns], [e.constant(0.0)] * vectors
    for i in e.loop(args.width, 1, outs):
        row = args.state_KV.moved(args.state_stride * i)
        key, query = e.splat(args.k_K.scalar(i)), e.splat(args.q_K.scalar(i))
        for n, column in enumerate(columns):
            former = row[column]
            value = e.fma(former, kept, e.fma(former, added, key * values[n]))
            row[column] = value
            outs[n] = e.fma(value, query, outs[n])
    for n, column in enumerate(columns):
        args.out_V[column] = outs[n]


decaying_step = function("moiety_decaying_step", partial(_step, vectors=VECTORS))


def _task(args: LinearAttentionArguments, task: int, scratch: int) -> None:
    shared = args.recurrence
    s, head, block = block_of_task(shared, task)
    begin, end, slot, has_state = load_sequence(shared.sequences, s)
    if begin == end:
        return
    width, row_bytes = shared.width, 4 * shared.value_width
    group = 4 * width * (head // shared.sharing)
    state = shared.state_NMKV + slot * shared.slot_stride + head * width * row_bytes + block
    if not has_state:
        clear_block(shared, state)
    for t in range(begin, end):
        row = t * shared.value_heads + head
        gate = load_f32(args.log_decay_TM, row)
        is_near_one = gate > _NEAR_ONE
        decaying_step(
            state_KV=state,
            state_stride=row_bytes,
            kept=1.0 if is_near_one else 0.0,
            added=math.expm1(gate) if is_near_one else math.exp(gate),
            k_K=shared.k_THK + t * shared.k_stride + group,
            q_K=shared.q_THK + t * shared.q_stride + group,
            width=width,
            v_V=shared.v_TMV + t * shared.v_stride + head * row_bytes + block,
            out_V=shared.out_TMV + row * row_bytes + block,
        )
