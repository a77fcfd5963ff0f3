"""The gated delta rule on a CPU, token by token: a task is one sequence's tokens in some columns of one value head.

A block of the state's columns stays in the L1 cache while all tokens of the sequence pass over it. The recurrence is
exact in the order of the tokens, so a token's bits depend neither on other sequences nor on how its sequence is cut
into chunks. T tokens, H key heads of width K, M value heads of width V, G gates a value head, N slots, S sequences.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.memory import load_f32, store_f32
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, team
from moiety_kernels.cpu.values import LANES, Float, Floats, Int
from moiety_kernels.cpu.vectors import copy_row, scale_row, sum_squares
from moiety_kernels.gated_delta.reference import EPS
from moiety_kernels.recurrent.cpu_tasks import (
    VECTORS,
    RecurrenceArguments,
    block_of_task,
    clear_block,
    fill,
    fits_recurrence,
    load_sequence,
    num_tasks,
    recurrence_arguments,
)

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

MAX_WIDTH = 1024  # of a key: four rows of it are in scratch


class GatedDeltaArguments(NamedTuple):
    """Arguments of the recurrence; the tensors are float32."""

    recurrence: RecurrenceArguments
    log_decay_TMG: Address
    beta_TM: Address
    gates: Int64  # G
    eps: Float64


def fits(
    heads: RecurrentHeads, log_decay_TMG: Tensor, beta_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> bool:
    """Return whether `gated_delta_rule` supports these tensors."""
    width = heads.k_THK.shape[2]
    return (
        fits_recurrence(heads, log_decay_TMG, state_NMKV, sequences)
        and width % LANES == 0
        and width <= MAX_WIDTH
        and beta_TM.is_contiguous()
    )


def gated_delta_rule(
    heads: RecurrentHeads, log_decay_TMG: Tensor, beta_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    out_TMV = heads.v_TMV.new_empty(heads.v_TMV.shape)
    args = GatedDeltaArguments(
        recurrence=recurrence_arguments(heads, state_NMKV, out_TMV, sequences),
        log_decay_TMG=log_decay_TMG.data_ptr(),
        beta_TM=beta_TM.data_ptr(),
        gates=log_decay_TMG.shape[2],
        eps=EPS,
    )
    team().run(_task, num_tasks(heads, sequences), args)
    return out_TMV


class StepArguments(NamedTuple):
    """Arguments of one token's step in a block of columns of the state."""

    state_KV: Floats
    state_stride: Int
    decay_K: Floats
    decayed_k_K: Floats  # the key times the decay
    k_K: Floats
    q_K: Floats
    width: Int  # K
    v_V: Floats
    beta: Float
    out_V: Floats


def _step(e: Emitter, args: StepArguments, *, vectors: int) -> None:
    """Emit S ← decay · S + k ⊗ β (v - (decay · S)ᵀ k) and out = Sᵀ q for `vectors` vectors of columns."""
    columns = [LANES * n for n in range(vectors)]
    recalled = [e.constant(0.0)] * vectors
    for i in e.loop(args.width, 1, recalled):
        row, weight = args.state_KV.moved(args.state_stride * i), e.splat(args.decayed_k_K.scalar(i))
        for n, column in enumerate(columns):
            recalled[n] = e.fma(row[column], weight, recalled[n])
    beta = e.splat(args.beta)
    change = [(args.v_V[column] - recalled[n]) * beta for n, column in enumerate(columns)]
    outs = [e.constant(0.0)] * vectors
    for i in e.loop(args.width, 1, outs):
        row, decay = args.state_KV.moved(args.state_stride * i), e.splat(args.decay_K.scalar(i))
        key, query = e.splat(args.k_K.scalar(i)), e.splat(args.q_K.scalar(i))
        for n, column in enumerate(columns):
            value = e.fma(key, change[n], row[column] * decay)
            row[column] = value
            outs[n] = e.fma(value, query, outs[n])
    for n, column in enumerate(columns):
        args.out_V[column] = outs[n]


def _exponentials(e: Emitter, row: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = e^row[i]."""
    for i in e.loop(count, LANES):
        out[i] = e.exp(row[i])


def _products(e: Emitter, a: Floats, b: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = a[i] · b[i]."""
    for i in e.loop(count, LANES):
        out[i] = a[i] * b[i]


step = function("moiety_gated_delta_step", partial(_step, vectors=VECTORS))
exponentials = function("moiety_exp_row", _exponentials)
products = function("moiety_multiply_rows", _products)

assert 4 * 4 * MAX_WIDTH < SCRATCH_BYTES


def _task(args: GatedDeltaArguments, task: int, scratch: int) -> None:
    shared, gates = args.recurrence, args.gates
    s, head, block = block_of_task(shared, task)
    begin, end, slot, has_state = load_sequence(shared.sequences, s)
    if begin == end:
        return
    width, key_bytes, row_bytes = shared.width, 4 * shared.width, 4 * shared.value_width
    q, k, decay = scratch, scratch + key_bytes, scratch + 2 * key_bytes
    decayed_k = scratch + 3 * key_bytes
    state = shared.state_NMKV + slot * shared.slot_stride + head * width * row_bytes + block
    if not has_state:
        clear_block(shared, state)
    group = head // shared.sharing
    for t in range(begin, end):
        copy_row(shared.q_THK + t * shared.q_stride + group * key_bytes, width, q)
        copy_row(shared.k_THK + t * shared.k_stride + group * key_bytes, width, k)
        scale_row(q, width, 1.0 / math.sqrt((sum_squares(q, width) + args.eps) * width))
        scale_row(k, width, 1.0 / math.sqrt(sum_squares(k, width) + args.eps))
        row = t * shared.value_heads + head
        if gates == 1:
            factor = math.exp(load_f32(args.log_decay_TMG, row))
            fill(factor, width, decay)
        else:
            exponentials(args.log_decay_TMG + row * key_bytes, width, decay)
        products(k, decay, width, decayed_k)
        step(
            state_KV=state,
            state_stride=row_bytes,
            decay_K=decay,
            decayed_k_K=decayed_k,
            k_K=k,
            q_K=q,
            width=width,
            v_V=shared.v_TMV + t * shared.v_stride + head * row_bytes + block,
            beta=load_f32(args.beta_TM, row),
            out_V=shared.out_TMV + row * row_bytes + block,
        )


_SOFTPLUS_IS_LINEAR = 20.0  # from here on log(1 + e^x) is x


class DeltaGatesArguments(NamedTuple):
    """Arguments of the gates of T tokens; the tensors are float32 and contiguous."""

    strength_decay_TG: Address
    decay_M: Address
    decay_bias_M: Address
    log_decay_TM: Address
    beta_TM: Address
    heads: Int64  # M


def fits_gates(strength_decay_TG: Tensor) -> bool:
    """Return whether `delta_gates` supports these projections."""
    return (
        strength_decay_TG.dtype is torch.float32
        and strength_decay_TG.is_contiguous()
        and 0 < strength_decay_TG.shape[0] < MAX_TASKS
    )


def delta_gates(strength_decay_TG: Tensor, decay_M: Tensor, decay_bias_M: Tensor) -> tuple[Tensor, Tensor]:
    """Return log_decay_TM and beta_TM. Numbers are computed one by one, so their bits depend on nothing else."""
    tokens, heads = strength_decay_TG.shape[0], decay_M.shape[0]
    log_decay_TM, beta_TM = (strength_decay_TG.new_empty(tokens, heads) for _ in range(2))
    args = DeltaGatesArguments(
        strength_decay_TG=strength_decay_TG.data_ptr(),
        decay_M=decay_M.data_ptr(),
        decay_bias_M=decay_bias_M.data_ptr(),
        log_decay_TM=log_decay_TM.data_ptr(),
        beta_TM=beta_TM.data_ptr(),
        heads=heads,
    )
    team().run(_gates_task, tokens, args)
    return log_decay_TM, beta_TM


def _gates_task(args: DeltaGatesArguments, task: int, scratch: int) -> None:
    heads = args.heads
    row = args.strength_decay_TG + 8 * heads * task
    for m in range(heads):
        strength, decay = load_f32(row, m), load_f32(row, heads + m) + load_f32(args.decay_bias_M, m)
        rate = decay if decay > _SOFTPLUS_IS_LINEAR else math.log1p(math.exp(decay))
        store_f32(args.log_decay_TM, task * heads + m, -math.exp(load_f32(args.decay_M, m)) * rate)
        store_f32(args.beta_TM, task * heads + m, 1.0 / (1.0 + math.exp(-strength)))
