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
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64
from moiety_kernels.cpu.structs import Address, Float64, Int64
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, team
from moiety_kernels.cpu.values import LANES, Float, Floats, Int
from moiety_kernels.cpu.vectors import copy_row, scale_row, sum_squares
from moiety_kernels.gated_delta.reference import EPS

if TYPE_CHECKING:
    from torch import Tensor

_VECTORS = 4  # of a block of columns
_COLUMNS = _VECTORS * LANES
MAX_WIDTH = 1024  # of a key: four rows of it are in scratch


class GatedDeltaArguments(NamedTuple):
    """Arguments of the recurrence; the tensors are float32."""

    q_THK: Address
    k_THK: Address
    v_TMV: Address
    log_decay_TMG: Address
    beta_TM: Address
    state_NMKV: Address
    out_TMV: Address
    slot_S: Address  # int64
    has_state_S: Address  # int32
    query_start_S1: Address  # int32
    q_stride: Int64  # bytes from one token to the next
    k_stride: Int64
    v_stride: Int64
    slot_stride: Int64  # bytes from one slot's state to the next
    value_heads: Int64  # M
    sharing: Int64  # M / H
    width: Int64  # K
    value_width: Int64  # V
    gates: Int64  # G
    eps: Float64


def fits(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TMG: Tensor,
    beta_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
) -> bool:
    """Return whether `gated_delta_rule` supports these tensors."""
    width, (value_heads, value_width) = k_THK.shape[2], v_TMV.shape[1:]
    blocks = value_heads * (value_width // _COLUMNS)
    return (
        q_THK.dtype is k_THK.dtype is v_TMV.dtype is torch.float32
        and has_state_S.dtype is query_start_S1.dtype is torch.int32
        and slot_S.dtype is torch.int64
        and width % LANES == 0
        and width <= MAX_WIDTH
        and value_width % _COLUMNS == 0
        and all(one.stride()[1:] == (one.shape[2], 1) for one in (q_THK, k_THK, v_TMV))
        and log_decay_TMG.is_contiguous()
        and beta_TM.is_contiguous()
        and state_NMKV[0].is_contiguous()
        and 0 < slot_S.shape[0] * blocks < MAX_TASKS
    )


def gated_delta_rule(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TMG: Tensor,
    beta_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    out_TMV = v_TMV.new_empty(v_TMV.shape)
    value_heads, value_width = v_TMV.shape[1:]
    args = GatedDeltaArguments(
        q_THK=q_THK.data_ptr(),
        k_THK=k_THK.data_ptr(),
        v_TMV=v_TMV.data_ptr(),
        log_decay_TMG=log_decay_TMG.data_ptr(),
        beta_TM=beta_TM.data_ptr(),
        state_NMKV=state_NMKV.data_ptr(),
        out_TMV=out_TMV.data_ptr(),
        slot_S=slot_S.data_ptr(),
        has_state_S=has_state_S.data_ptr(),
        query_start_S1=query_start_S1.data_ptr(),
        q_stride=4 * q_THK.stride(0),
        k_stride=4 * k_THK.stride(0),
        v_stride=4 * v_TMV.stride(0),
        slot_stride=4 * state_NMKV.stride(0),
        value_heads=value_heads,
        sharing=value_heads // k_THK.shape[1],
        width=k_THK.shape[2],
        value_width=value_width,
        gates=log_decay_TMG.shape[2],
        eps=EPS,
    )
    team().run(_task, slot_S.shape[0] * value_heads * (value_width // _COLUMNS), args)
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


def _fill(e: Emitter, value: Float, count: Int, out: Floats) -> None:
    """Emit out[i] = value."""
    values = e.splat(value)
    for i in e.loop(count, LANES):
        out[i] = values


step = function("moiety_gated_delta_step", partial(_step, vectors=_VECTORS))
exponentials = function("moiety_exp_row", _exponentials)
products = function("moiety_multiply_rows", _products)
fill = function("moiety_fill_row", _fill)

assert 4 * 4 * MAX_WIDTH < SCRATCH_BYTES


def _task(args: GatedDeltaArguments, task: int, scratch: int) -> None:
    width, value_width, value_heads = args.width, args.value_width, args.value_heads
    num_blocks = value_width // _COLUMNS
    s, block = task // (value_heads * num_blocks), 4 * _COLUMNS * (task % num_blocks)
    head = task // num_blocks % value_heads
    begin, end = load_i32(args.query_start_S1, s), load_i32(args.query_start_S1, s + 1)
    if begin == end:
        return
    key_bytes, row_bytes = 4 * width, 4 * value_width
    q, k, decay = scratch, scratch + key_bytes, scratch + 2 * key_bytes
    decayed_k = scratch + 3 * key_bytes
    state = args.state_NMKV + load_i64(args.slot_S, s) * args.slot_stride + head * width * row_bytes + block
    if load_i32(args.has_state_S, s) == 0:
        for i in range(width):
            fill(0.0, _COLUMNS, state + i * row_bytes)
    group, gates = head // args.sharing, args.gates
    for t in range(begin, end):
        copy_row(args.q_THK + t * args.q_stride + group * key_bytes, width, q)
        copy_row(args.k_THK + t * args.k_stride + group * key_bytes, width, k)
        scale_row(q, width, 1.0 / math.sqrt((sum_squares(q, width) + args.eps) * width))
        scale_row(k, width, 1.0 / math.sqrt(sum_squares(k, width) + args.eps))
        row = t * value_heads + head
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
            v_V=args.v_TMV + t * args.v_stride + head * row_bytes + block,
            beta=load_f32(args.beta_TM, row),
            out_V=args.out_TMV + row * row_bytes + block,
        )
