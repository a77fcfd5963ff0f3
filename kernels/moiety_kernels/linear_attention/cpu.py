"""Linear attention with a decaying state on a CPU, token by token, as `gated_delta` has it.

T tokens, H key heads of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import MAX_TASKS, team
from moiety_kernels.cpu.values import LANES, Float, Floats, Int
from moiety_kernels.gated_delta.cpu import fill

if TYPE_CHECKING:
    from torch import Tensor

_VECTORS = 4  # of a block of columns
_COLUMNS = _VECTORS * LANES


class LinearAttentionArguments(NamedTuple):
    """Arguments of the recurrence; the tensors are float32."""

    q_THK: Address
    k_THK: Address
    v_TMV: Address
    log_decay_TM: Address
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


def fits(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
) -> bool:
    """Return whether `linear_attention` supports these tensors."""
    value_heads, value_width = v_TMV.shape[1:]
    return (
        q_THK.dtype is k_THK.dtype is v_TMV.dtype is torch.float32
        and has_state_S.dtype is query_start_S1.dtype is torch.int32
        and slot_S.dtype is torch.int64
        and value_width % _COLUMNS == 0
        and all(one.stride()[1:] == (one.shape[2], 1) for one in (q_THK, k_THK, v_TMV))
        and log_decay_TM.is_contiguous()
        and state_NMKV[0].is_contiguous()
        and 0 < slot_S.shape[0] * value_heads * (value_width // _COLUMNS) < MAX_TASKS
    )


def linear_attention(
    q_THK: Tensor,
    k_THK: Tensor,
    v_TMV: Tensor,
    log_decay_TM: Tensor,
    state_NMKV: Tensor,
    slot_S: Tensor,
    has_state_S: Tensor,
    query_start_S1: Tensor,
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    out_TMV = v_TMV.new_empty(v_TMV.shape)
    value_heads, value_width = v_TMV.shape[1:]
    args = LinearAttentionArguments(
        q_THK=q_THK.data_ptr(),
        k_THK=k_THK.data_ptr(),
        v_TMV=v_TMV.data_ptr(),
        log_decay_TM=log_decay_TM.data_ptr(),
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
    )
    team().run(_task, slot_S.shape[0] * value_heads * (value_width // _COLUMNS), args)
    return out_TMV


class DecayingStepArguments(NamedTuple):
    """Arguments of one token's step in a block of columns of the state."""

    state_KV: Floats
    state_stride: Int
    decay: Float
    k_K: Floats
    q_K: Floats
    width: Int  # K
    v_V: Floats
    out_V: Floats


def _step(e: Emitter, args: DecayingStepArguments, *, vectors: int) -> None:
    """Emit S ← decay · S + k ⊗ v and out = Sᵀ q for `vectors` vectors of columns."""
    columns, decay = [LANES * n for n in range(vectors)], e.splat(args.decay)
    values, outs = [args.v_V[column] for column in columns], [e.constant(0.0)] * vectors
    for i in e.loop(args.width, 1, outs):
        row = args.state_KV.moved(args.state_stride * i)
        key, query = e.splat(args.k_K.scalar(i)), e.splat(args.q_K.scalar(i))
        for n, column in enumerate(columns):
            value = e.fma(key, values[n], row[column] * decay)
            row[column] = value
            outs[n] = e.fma(value, query, outs[n])
    for n, column in enumerate(columns):
        args.out_V[column] = outs[n]


decaying_step = function("moiety_decaying_step", partial(_step, vectors=_VECTORS))


def _task(args: LinearAttentionArguments, task: int, scratch: int) -> None:
    width, value_width, value_heads = args.width, args.value_width, args.value_heads
    num_blocks = value_width // _COLUMNS
    s, block = task // (value_heads * num_blocks), 4 * _COLUMNS * (task % num_blocks)
    head = task // num_blocks % value_heads
    begin, end = load_i32(args.query_start_S1, s), load_i32(args.query_start_S1, s + 1)
    if begin == end:
        return
    row_bytes, group = 4 * value_width, 4 * width * (head // args.sharing)
    state = args.state_NMKV + load_i64(args.slot_S, s) * args.slot_stride + head * width * row_bytes + block
    if load_i32(args.has_state_S, s) == 0:
        for i in range(width):
            fill(0.0, _COLUMNS, state + i * row_bytes)
    for t in range(begin, end):
        row = t * value_heads + head
        decaying_step(
            state_KV=state,
            state_stride=row_bytes,
            decay=math.exp(load_f32(args.log_decay_TM, row)),
            k_K=args.k_THK + t * args.k_stride + group,
            q_K=args.q_THK + t * args.q_stride + group,
            width=width,
            v_V=args.v_TMV + t * args.v_stride + head * row_bytes + block,
            out_V=args.out_TMV + row * row_bytes + block,
        )
