"""Causal depthwise convolution in Triton: a program computes some tokens of one sequence in some channels.

A second kernel replaces the tails once all programs of the first have read them. T tokens, C channels, W taps,
w = W - 1, N slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.causal_conv.weights import CausalConvWeights
    from moiety_kernels.recurrent.inputs import RecurrentSequences

_TOKENS, _CHANNELS = 16, 128


def fits(x_TC: Tensor, tail_NwC: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return x_TC.stride(1) == 1 and tail_NwC[0].is_contiguous()


def causal_conv(x_TC: Tensor, weights: CausalConvWeights, tail_NwC: Tensor, sequences: RecurrentSequences) -> Tensor:
    """Return out_TC, contiguous, and replace the tails."""
    out_TC = x_TC.new_empty(x_TC.shape)
    channels, taps = x_TC.shape[1], weights.weight_WC.shape[0]
    starts = sequences.slot_S, sequences.has_state_S, sequences.query_start_S1
    strides = channels, x_TC.stride(0), tail_NwC.stride(0)
    parts, num_sequences = triton.cdiv(channels, _CHANNELS), sequences.slot_S.shape[0]
    if x_TC.shape[0] == 0 or num_sequences == 0:
        return out_TC
    convolve[(triton.cdiv(sequences.max_query, _TOKENS), num_sequences, parts)](
        x_TC, weights.weight_WC.contiguous(), weights.bias_C, tail_NwC, out_TC, *starts, *strides, TAPS=taps,
        SILU=weights.silu, TOKENS=_TOKENS, CHANNELS=_CHANNELS,
    )  # fmt: skip
    keep_tail[(num_sequences, parts)](
        x_TC, tail_NwC, *starts, *strides, TAPS=taps, ROWS=triton.next_power_of_2(taps), CHANNELS=_CHANNELS
    )
    return out_TC


@triton.jit
def convolve(
    p_x,
    p_weight,
    p_bias,
    p_tail,
    p_out,
    p_slot,
    p_has_state,
    p_start,
    channels,
    x_stride,
    slot_stride,
    TAPS: tl.constexpr,
    SILU: tl.constexpr,
    TOKENS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    i_sequence = tl.program_id(1)
    begin, end = tl.load(p_start + i_sequence).to(tl.int64), tl.load(p_start + i_sequence + 1).to(tl.int64)
    first = begin + tl.program_id(0) * TOKENS
    if first >= end:
        return
    t = first + tl.arange(0, TOKENS)
    i_channel = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    m_channel = i_channel < channels
    m_out = (t < end)[:, None] & m_channel[None, :]
    has_state = tl.load(p_has_state + i_sequence) != 0
    p_own = p_tail + tl.load(p_slot + i_sequence) * slot_stride
    total = tl.zeros((TOKENS, CHANNELS), tl.float32)
    for tap in tl.static_range(TAPS):
        source = t - (TAPS - 1) + tap
        weight = tl.load(p_weight + tap * channels + i_channel, mask=m_channel, other=0.0).to(tl.float32)
        m_here = (source >= begin)[:, None] & m_out
        x = tl.load(p_x + source[:, None] * x_stride + i_channel[None, :], mask=m_here, other=0.0).to(tl.float32)
        m_before = (source < begin)[:, None] & m_out & has_state
        place = source - begin + (TAPS - 1)
        x += tl.load(p_own + place[:, None] * channels + i_channel[None, :], mask=m_before, other=0.0).to(tl.float32)
        total += x * weight[None, :]
    if p_bias is not None:
        total += tl.load(p_bias + i_channel, mask=m_channel, other=0.0).to(tl.float32)[None, :]
    if SILU:
        total *= tl.sigmoid(total)
    tl.store(p_out + t[:, None] * channels + i_channel[None, :], total.to(p_out.dtype.element_ty), mask=m_out)


@triton.jit
def keep_tail(
    p_x,
    p_tail,
    p_slot,
    p_has_state,
    p_start,
    channels,
    x_stride,
    slot_stride,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    CHANNELS: tl.constexpr,
):
    i_sequence = tl.program_id(0)
    begin, end = tl.load(p_start + i_sequence).to(tl.int64), tl.load(p_start + i_sequence + 1).to(tl.int64)
    if begin == end:
        return
    i_place = tl.arange(0, ROWS)
    i_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    m_tail = (i_place < TAPS - 1)[:, None] & (i_channel < channels)[None, :]
    source = end - (TAPS - 1) + i_place
    p_own = p_tail + tl.load(p_slot + i_sequence) * slot_stride
    m_before = (source < begin)[:, None] & m_tail & (tl.load(p_has_state + i_sequence) != 0)
    place = source - begin + (TAPS - 1)
    kept = tl.load(p_own + place[:, None] * channels + i_channel[None, :], mask=m_before, other=0.0)
    m_here = (source >= begin)[:, None] & m_tail
    x = tl.load(p_x + source[:, None] * x_stride + i_channel[None, :], mask=m_here, other=0.0)
    kept += x.to(kept.dtype)
    tl.debug_barrier()  # other threads of the program may still read the rows that are replaced
    tl.store(p_own + i_place[:, None] * channels + i_channel[None, :], kept, mask=m_tail)


def compile_cases() -> list[CompileCase]:
    """Return the cases of four taps with SiLU, as gated DeltaNet and Mamba-2 have them, and of three without."""
    pointers = {"p_x": "*bf16", "p_weight": "*fp32", "p_bias": "*fp32", "p_tail": "*bf16", "p_out": "*bf16"}
    pointers |= {"p_slot": "*i64", "p_has_state": "*i32", "p_start": "*i32"}
    found = []
    for taps, silu in ((4, True), (3, False)):
        constants = {"TAPS": taps, "SILU": silu, "TOKENS": _TOKENS, "CHANNELS": _CHANNELS, "ROWS": 4}
        for kernel in (convolve, keep_tail):
            known = {name: value for name, value in constants.items() if name in kernel.arg_names}
            given = [name for name in kernel.arg_names if name not in known]
            signature = {name: pointers.get(name, "i32") for name in given}
            unaligned = frozenset(("p_slot", "p_has_state", "p_start"))
            found.append(CompileCase(f"{kernel.__name__} {taps}", kernel, signature, known, unaligned=unaligned))
    return found
