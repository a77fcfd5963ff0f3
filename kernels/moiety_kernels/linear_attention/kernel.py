"""Linear attention with a decaying state in Triton: a program passes over one sequence in some columns of one head.

Prompts are computed in chunks of tokens by matrix products, and decodes as chunks of one token. T tokens, H key heads
of width K, M value heads of width V, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moiety_kernels.recurrent.kernels.chunks import decay_between, load_chunk, load_state, store_chunk, token_range
from moiety_kernels.recurrent.launching import head_constants, make_compile_case, sequence_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.gpu.cases import CompileCase
    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

CHUNK = 64
MAX_WIDTH = 256
_COLUMNS = 16  # of the state in one program
NEAR_ONE = tl.constexpr(-0.03125)  # gates above it have a decay near 1
_WARPS, _STAGES = 4, 1  # what a chunk's rows leave of registers and shared memory


def fits(heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    width, value_width = state_NMKV.shape[2:]
    return (
        width == triton.next_power_of_2(width)
        and 16 <= width <= MAX_WIDTH
        and value_width % _COLUMNS == 0
        and heads.has_contiguous_tokens
        and log_decay_TM.is_contiguous()
        and state_NMKV[0].is_contiguous()
    )


def linear_attention(
    heads: RecurrentHeads, log_decay_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    q_THK, k_THK, v_TMV = heads.q_THK, heads.k_THK, heads.v_TMV
    out_TMV = v_TMV.new_empty(v_TMV.shape)
    value_heads, value_width = v_TMV.shape[1:]
    blocks, num_sequences = value_width // _COLUMNS, sequences.slot_S.shape[0]
    shape = head_constants(heads) | {"COLUMNS": _COLUMNS}
    strides = q_THK.stride(0), k_THK.stride(0), v_TMV.stride(0), state_NMKV.stride(0)
    args = q_THK, k_THK, v_TMV, log_decay_TM, state_NMKV, out_TMV, *sequence_tensors(sequences), *strides
    num_decode = num_sequences if sequences.max_query == 1 else sequences.num_decode
    if num_decode:
        decay_one[(num_decode, value_heads, blocks)](*args, **shape)
    if num_sequences > num_decode:
        decay_chunks[(num_sequences - num_decode, value_heads, blocks)](
            *args, num_decode, **shape, CHUNK=CHUNK, num_warps=_WARPS, num_stages=_STAGES
        )
    return out_TMV


@triton.jit
def less_than_one(gate):
    """Return e^gate - 1, for gates between `NEAR_ONE` and 0, by its series: there are few bits in e^gate."""
    return gate * (1.0 + gate * (0.5 + gate * (1.0 / 6.0 + gate * (1.0 / 24.0))))


@triton.jit
def decay_one(
    p_q,
    p_k,
    p_v,
    p_log_decay,
    p_state,
    p_out,
    p_slot,
    p_has_state,
    p_start,
    q_stride,
    k_stride,
    v_stride,
    slot_stride,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i_sequence, i_head = tl.program_id(0), tl.program_id(1)
    t, end = token_range(p_start, i_sequence)
    if t >= end:
        return
    i_group = i_head // (VALUE_HEADS // HEADS)
    i_key = tl.arange(0, WIDTH)
    i_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    p_own, state = load_state(
        p_state, p_slot, p_has_state, i_sequence, i_head, i_key, i_column, slot_stride, WIDTH, VALUE_WIDTH
    )
    row = t * VALUE_HEADS + i_head
    q = tl.load(p_q + t * q_stride + i_group * WIDTH + i_key).to(tl.float32)
    k = tl.load(p_k + t * k_stride + i_group * WIDTH + i_key).to(tl.float32)
    v = tl.load(p_v + t * v_stride + i_head * VALUE_WIDTH + i_column).to(tl.float32)
    gate = tl.load(p_log_decay + row)
    entry = k[:, None] * v[None, :]
    state = tl.where(gate > NEAR_ONE, state + (state * less_than_one(gate) + entry), state * tl.exp(gate) + entry)
    out = tl.sum(state * q[:, None], axis=0)
    tl.store(p_out + row * VALUE_WIDTH + i_column, out.to(p_out.dtype.element_ty))
    tl.store(p_own, state)


@triton.jit
def decay_chunks(
    p_q,
    p_k,
    p_v,
    p_log_decay,
    p_state,
    p_out,
    p_slot,
    p_has_state,
    p_start,
    q_stride,
    k_stride,
    v_stride,
    slot_stride,
    first_sequence,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    i_sequence, i_head = tl.program_id(0) + first_sequence, tl.program_id(1)
    i_group = i_head // (VALUE_HEADS // HEADS)
    begin, end = token_range(p_start, i_sequence)
    i_token, i_key = tl.arange(0, CHUNK), tl.arange(0, WIDTH)
    i_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    p_own, state = load_state(
        p_state, p_slot, p_has_state, i_sequence, i_head, i_key, i_column, slot_stride, WIDTH, VALUE_WIDTH
    )
    kind = p_k.dtype.element_ty
    is_seen = i_token[:, None] >= i_token[None, :]
    for first in range(begin, end, CHUNK):
        t = first + i_token
        m_token = t < end
        row = t * VALUE_HEADS + i_head
        k = load_chunk(p_k + t * k_stride + i_group * WIDTH, i_key, m_token)
        q = load_chunk(p_q + t * q_stride + i_group * WIDTH, i_key, m_token)
        v = load_chunk(p_v + t * v_stride + i_head * VALUE_WIDTH, i_column, m_token)
        total = tl.cumsum(tl.load(p_log_decay + row, mask=m_token, other=0.0), axis=0)
        last = tl.sum(tl.where(i_token == CHUNK - 1, total, 0.0), axis=0)  # no gates after the end
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * decay_between(total, is_seen)
        scores = tl.where(is_seen, scores, 0.0).to(kind)
        out = tl.dot(q, state.to(kind), input_precision="ieee") * tl.exp(total)[:, None]
        out = tl.dot(scores, v, out, input_precision="ieee")
        store_chunk(p_out + row * VALUE_WIDTH, i_column, out, m_token)
        left = (v.to(tl.float32) * tl.exp(last - total)[:, None]).to(kind)
        state = tl.dot(tl.trans(k), left, state * tl.exp(last), input_precision="ieee")
    if begin < end:
        tl.store(p_own, state)


def compile_cases() -> list[CompileCase]:
    """Return the cases of Mamba-2's states of 128 and of lightning attention's heads of 128."""
    pointers = dict.fromkeys(("p_q", "p_k", "p_v", "p_out"), "*bf16")
    pointers |= dict.fromkeys(("p_log_decay", "p_state"), "*fp32")
    found = []
    for name, heads, value_width in (("Mamba-2", 8, 64), ("lightning", 64, 128)):
        constants = {
            "HEADS": heads, "VALUE_HEADS": 64, "WIDTH": 128, "VALUE_WIDTH": value_width, "COLUMNS": _COLUMNS,
            "CHUNK": CHUNK,
        }  # fmt: skip
        for kernel in (decay_one, decay_chunks):
            warps = (_WARPS, _STAGES) if kernel is decay_chunks else (4, 3)
            found.append(make_compile_case(kernel, name, pointers, constants, warps))
    return found
