"""The gated delta rule in Triton: chunks of tokens for prompts, one token at a time for decodes.

`recur` runs the recurrence as it is defined, with a block of the state's columns in registers. For prompts with one
gate a head, `prepare` solves each chunk's triangular system (the UT transform of 2406.06484 with the gates of
2412.06464), all chunks at once, and `scan` passes the state over a sequence's chunks. The README has the mathematics.
T tokens, H key heads of width K, M value heads of width V, G gates a value head, N slots, S sequences, C tokens of a
chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from moiety_kernels.gated_delta.reference import EPS
from moiety_kernels.recurrent.kernels.chunks import decay_between, load_chunk, load_state, store_chunk, token_range
from moiety_kernels.recurrent.launching import head_constants, make_compile_case, sequence_tensors

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.gpu.cases import CompileCase
    from moiety_kernels.recurrent.inputs import RecurrentHeads, RecurrentSequences

CHUNK = 64
MAX_WIDTH = 256
_COLUMNS = 16  # of the state in one program
_SCAN_WARPS, _SCAN_STAGES = 8, 1  # what a chunk's rows leave of registers and shared memory


def fits(heads: RecurrentHeads, log_decay_TMG: Tensor, state_NMKV: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return (
        fits_widths(*state_NMKV.shape[2:])
        and heads.has_contiguous_tokens
        and log_decay_TMG.is_contiguous()
        and state_NMKV[0].is_contiguous()
    )


def fits_widths(width: int, value_width: int) -> bool:
    """Return whether the kernels support heads of these widths of keys and values."""
    return all(
        width_of_head == triton.next_power_of_2(width_of_head) and 16 <= width_of_head <= MAX_WIDTH
        for width_of_head in (width, value_width)
    )


def gated_delta_rule(
    heads: RecurrentHeads, log_decay_TMG: Tensor, beta_TM: Tensor, state_NMKV: Tensor, sequences: RecurrentSequences
) -> Tensor:
    """Return out_TMV, contiguous, and replace the states."""
    q_THK, k_THK, v_TMV = heads.q_THK, heads.k_THK, heads.v_TMV
    out_TMV = v_TMV.new_empty(v_TMV.shape)
    tokens, value_heads, value_width = v_TMV.shape
    width, num_sequences, gates = k_THK.shape[2], sequences.slot_S.shape[0], log_decay_TMG.shape[2]
    columns = min(_COLUMNS, value_width)
    blocks = value_width // columns
    starts = sequence_tensors(sequences)
    strides = q_THK.stride(0), k_THK.stride(0), v_TMV.stride(0), state_NMKV.stride(0)
    shape = head_constants(heads) | {"EPS": EPS}
    is_chunked = gates == 1
    num_recurred = sequences.num_decode if is_chunked else num_sequences
    if num_recurred:
        recur[(num_recurred, value_heads, blocks)](
            q_THK, k_THK, v_TMV, log_decay_TMG, beta_TM, state_NMKV, out_TMV, *starts, *strides, **shape,
            GATES=gates, COLUMNS=columns,
        )  # fmt: skip
    num_chunked = num_sequences - num_recurred
    if num_chunked == 0 or tokens == 0:
        return out_TMV
    new_v_TMV = torch.empty_like(out_TMV)
    read_k_TMK = q_THK.new_empty(tokens, value_heads, width)
    factors = [beta_TM.new_empty(tokens, value_heads) for _ in range(3)]
    prepare[(triton.cdiv(sequences.max_query, CHUNK), num_chunked, value_heads)](
        q_THK, k_THK, v_TMV, log_decay_TMG, beta_TM, new_v_TMV, read_k_TMK, *factors, starts[2], *strides[:3],
        num_recurred, **shape, CHUNK=CHUNK,
    )  # fmt: skip
    scan[(num_chunked, value_heads, blocks)](
        q_THK, k_THK, new_v_TMV, read_k_TMK, *factors, state_NMKV, out_TMV, *starts, q_THK.stride(0),
        k_THK.stride(0), state_NMKV.stride(0), num_recurred, **shape, CHUNK=CHUNK, COLUMNS=columns,
        num_warps=_SCAN_WARPS, num_stages=_SCAN_STAGES,
    )  # fmt: skip
    return out_TMV


@triton.jit
def recur(
    p_q,
    p_k,
    p_v,
    p_log_decay,
    p_beta,
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
    EPS: tl.constexpr,
    GATES: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    i_sequence, i_head = tl.program_id(0), tl.program_id(1)
    i_group = i_head // (VALUE_HEADS // HEADS)
    begin, end = token_range(p_start, i_sequence)
    i_key = tl.arange(0, WIDTH)
    i_column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    p_own, state = load_state(
        p_state, p_slot, p_has_state, i_sequence, i_head, i_key, i_column, slot_stride, WIDTH, VALUE_WIDTH
    )
    for t in range(begin, end):
        row = t * VALUE_HEADS + i_head
        q = tl.load(p_q + t * q_stride + i_group * WIDTH + i_key).to(tl.float32)
        k = tl.load(p_k + t * k_stride + i_group * WIDTH + i_key).to(tl.float32)
        v = tl.load(p_v + t * v_stride + i_head * VALUE_WIDTH + i_column).to(tl.float32)
        q *= tl.rsqrt((tl.sum(q * q, axis=0) + EPS) * WIDTH)
        k *= tl.rsqrt(tl.sum(k * k, axis=0) + EPS)
        if GATES == 1:
            state *= tl.exp(tl.load(p_log_decay + row))
        else:
            state *= tl.exp(tl.load(p_log_decay + row * WIDTH + i_key))[:, None]
        recalled = tl.sum(state * k[:, None], axis=0)
        change = (v - recalled) * tl.load(p_beta + row)
        state += k[:, None] * change[None, :]
        out = tl.sum(state * q[:, None], axis=0)
        tl.store(p_out + row * VALUE_WIDTH + i_column, out.to(p_out.dtype.element_ty))
    if begin < end:
        tl.store(p_own, state)


@triton.jit
def prepare(
    p_q,
    p_k,
    p_v,
    p_log_decay,
    p_beta,
    p_new_v,
    p_read_k,
    p_total,
    p_q_length,
    p_k_length,
    p_start,
    q_stride,
    k_stride,
    v_stride,
    first_sequence,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Compute one chunk of one head: its tokens' writes before the state is known, and factors that `scan` needs.

    `total` are the sums of the gates within the chunk, `q_length` and `k_length` one over the lengths of the rows.
    """
    i_sequence, i_head = tl.program_id(1) + first_sequence, tl.program_id(2)
    i_group = i_head // (VALUE_HEADS // HEADS)
    begin, end = token_range(p_start, i_sequence)
    first = begin + tl.program_id(0) * CHUNK
    if first >= end:
        return
    i_token = tl.arange(0, CHUNK)
    t = first + i_token
    m_token = t < end
    row = t * VALUE_HEADS + i_head
    i_key, i_value = tl.arange(0, WIDTH), tl.arange(0, VALUE_WIDTH)
    k = load_chunk(p_k + t * k_stride + i_group * WIDTH, i_key, m_token)
    kind = k.dtype
    wide = k.to(tl.float32)
    length = tl.rsqrt(tl.sum(wide * wide, axis=1) + EPS)
    tl.store(p_k_length + row, length, mask=m_token)
    q = load_chunk(p_q + t * q_stride + i_group * WIDTH, i_key, m_token)
    wide = q.to(tl.float32)
    tl.store(p_q_length + row, tl.rsqrt((tl.sum(wide * wide, axis=1) + EPS) * WIDTH), mask=m_token)
    beta = tl.load(p_beta + row, mask=m_token, other=0.0)
    total = tl.cumsum(tl.load(p_log_decay + row, mask=m_token, other=0.0), axis=0)
    tl.store(p_total + row, total, mask=m_token)
    overlap = tl.dot(k, tl.trans(k), input_precision="ieee") * (beta * length)[:, None] * length[None, :]
    is_later = i_token[:, None] > i_token[None, :]
    decay = decay_between(total, is_later)
    inverse = tl.where(is_later, -overlap * decay, 0.0)
    for i in range(1, CHUNK):  # rows before i are those of (1 + overlap)⁻¹ - 1
        is_row = i_token == i
        of_row = tl.sum(tl.where(is_row[:, None], inverse, 0.0), axis=0)
        of_row += tl.sum(of_row[:, None] * inverse, axis=0)
        inverse = tl.where(is_row[:, None], of_row[None, :], inverse)
    inverse += tl.where(i_token[:, None] == i_token[None, :], 1.0, 0.0)
    v = load_chunk(p_v + t * v_stride + i_head * VALUE_WIDTH, i_value, m_token)
    new_v = tl.dot((inverse * beta[None, :]).to(kind), v, input_precision="ieee")
    store_chunk(p_new_v + row * VALUE_WIDTH, i_value, new_v, m_token)
    of_key = (inverse * (beta * length * tl.exp(total))[None, :]).to(kind)
    read_k = tl.dot(of_key, k, input_precision="ieee")
    store_chunk(p_read_k + row * WIDTH, i_key, read_k, m_token)


@triton.jit
def scan(
    p_q,
    p_k,
    p_new_v,
    p_read_k,
    p_total,
    p_q_length,
    p_k_length,
    p_state,
    p_out,
    p_slot,
    p_has_state,
    p_start,
    q_stride,
    k_stride,
    slot_stride,
    first_sequence,
    HEADS: tl.constexpr,
    VALUE_HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    CHUNK: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Process all chunks of one sequence, in some columns of one head's state."""
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
        k_length = tl.load(p_k_length + row, mask=m_token, other=0.0)
        q = load_chunk(p_q + t * q_stride + i_group * WIDTH, i_key, m_token)
        q_length = tl.load(p_q_length + row, mask=m_token, other=0.0)
        total = tl.load(p_total + row, mask=m_token, other=0.0)
        last = tl.sum(tl.where(t == tl.minimum(first + CHUNK, end) - 1, total, 0.0), axis=0)
        read_k = load_chunk(p_read_k + row * WIDTH, i_key, m_token)
        written = load_chunk(p_new_v + row * VALUE_WIDTH, i_column, m_token).to(tl.float32)
        narrow = state.to(kind)
        written -= tl.dot(read_k, narrow, input_precision="ieee")
        decay = decay_between(total, is_seen)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * decay * q_length[:, None] * k_length[None, :]
        scores = tl.where(is_seen, scores, 0.0).to(kind)
        out = tl.dot(q, narrow, input_precision="ieee") * (q_length * tl.exp(total))[:, None]
        out = tl.dot(scores, written.to(kind), out, input_precision="ieee")
        store_chunk(p_out + row * VALUE_WIDTH, i_column, out, m_token)
        left = tl.where(m_token, k_length * tl.exp(last - total), 0.0)
        state *= tl.exp(last)
        state = tl.dot(tl.trans(k), (written * left[:, None]).to(kind), state, input_precision="ieee")
    if begin < end:
        tl.store(p_own, state)


def compile_cases() -> list[CompileCase]:
    """Return the cases of Qwen3-Next's heads of 128 and of narrow ones, and of a gate a channel."""
    pointers = dict.fromkeys(("p_q", "p_k", "p_v", "p_out", "p_new_v", "p_read_k"), "*bf16")
    pointers |= dict.fromkeys(("p_log_decay", "p_beta", "p_state", "p_total", "p_q_length", "p_k_length"), "*fp32")
    found = []
    for width in (64, 128):
        constants: dict[str, Any] = {
            "HEADS": 16, "VALUE_HEADS": 32, "WIDTH": width, "VALUE_WIDTH": width, "EPS": EPS, "CHUNK": CHUNK,
            "COLUMNS": _COLUMNS,
        }  # fmt: skip
        for kernel, gates in ((recur, 1), (recur, width), (prepare, 1), (scan, 1)):
            name = f"{width}{' by channel' if gates > 1 else ''}"
            warps = (_SCAN_WARPS, _SCAN_STAGES) if kernel is scan else (4, 3)
            found.append(make_compile_case(kernel, name, pointers, constants | {"GATES": gates}, warps))
    return found
