"""Selective scan in Triton: a program passes over the tokens of one sequence in some channels, one after the other.

T tokens, C channels, N rows of the state, L slots, S sequences.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl

from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.recurrent.inputs import RecurrentSequences
    from moiety_kernels.selective_scan.inputs import ScanInputs

MAX_ROWS = 256
_CHANNELS = 32  # of one program
_WARPS = 1


def fits(
    inputs: ScanInputs,
    state_LNC: Tensor,
) -> bool:
    """Return whether the kernel supports these tensors."""
    rows = inputs.rate_NC.shape[0]
    return (
        rows == triton.next_power_of_2(rows)
        and rows <= MAX_ROWS
        and all(one.stride(1) == 1 for one in inputs.of_tokens)
        and all(one.is_contiguous() for one in (*inputs.weights, state_LNC[0]))
    )


def selective_scan(
    inputs: ScanInputs,
    state_LNC: Tensor,
    sequences: RecurrentSequences,
) -> Tensor:
    """Return out_TC, contiguous, and replace the states."""
    (tokens, channels), num_sequences = inputs.x_TC.shape, sequences.slot_S.shape[0]
    out_TC = inputs.x_TC.new_empty((tokens, channels))
    if not num_sequences or not tokens:
        return out_TC
    starts = sequences.slot_S, sequences.has_state_S, sequences.query_start_S1
    strides = [one.stride(0) for one in (*inputs.of_tokens, state_LNC)]
    scan[(num_sequences, triton.cdiv(channels, _CHANNELS))](
        *inputs, state_LNC, out_TC, *starts, *strides, channels,
        ROWS=inputs.rate_NC.shape[0], CHANNELS=_CHANNELS, num_warps=_WARPS,
    )  # fmt: skip
    return out_TC


@triton.jit
def scan(
    p_x, p_step, p_gate, p_write, p_read, p_rate, p_bias, p_skip, p_state, p_out, p_slot, p_has_state, p_start,
    x_stride, step_stride, gate_stride, write_stride, read_stride, slot_stride, channels,
    ROWS: tl.constexpr, CHANNELS: tl.constexpr,
):  # fmt: skip
    i_sequence = tl.program_id(0)
    i_channel = tl.program_id(1) * CHANNELS + tl.arange(0, CHANNELS)
    m_channel = i_channel < channels
    i_row = tl.arange(0, ROWS)
    begin, end = tl.load(p_start + i_sequence).to(tl.int64), tl.load(p_start + i_sequence + 1).to(tl.int64)
    i_own = i_row.to(tl.int64)[:, None] * channels + i_channel[None, :]
    p_own = p_state + tl.load(p_slot + i_sequence) * slot_stride + i_own
    has_state = tl.load(p_has_state + i_sequence) != 0
    state = tl.load(p_own, mask=has_state & m_channel[None, :], other=0.0)
    rate = tl.load(p_rate + i_own, mask=m_channel[None, :], other=0.0)
    bias = tl.load(p_bias + i_channel, mask=m_channel, other=0.0)
    skip = tl.load(p_skip + i_channel, mask=m_channel, other=0.0)
    for t in range(begin, end):
        x = tl.load(p_x + t * x_stride + i_channel, mask=m_channel, other=0.0).to(tl.float32)
        raw = tl.load(p_step + t * step_stride + i_channel, mask=m_channel, other=0.0).to(tl.float32)
        gate = tl.load(p_gate + t * gate_stride + i_channel, mask=m_channel, other=0.0).to(tl.float32)
        write = tl.load(p_write + t * write_stride + i_row).to(tl.float32)
        read = tl.load(p_read + t * read_stride + i_row).to(tl.float32)
        step = softplus(raw + bias)
        state = state * tl.exp(step[None, :] * rate) + write[:, None] * (step * x)[None, :]
        out = tl.sum(state * read[:, None], axis=0) + skip * x
        out *= gate * tl.sigmoid(gate)
        tl.store(p_out + t * channels + i_channel, out.to(p_out.dtype.element_ty), mask=m_channel)
    if begin < end:
        tl.store(p_own, state, mask=m_channel[None, :])


@triton.jit
def softplus(x):
    """Return log(1 + e^x), exact to rounding where e^x is small (Kahan)."""
    power = tl.exp(tl.minimum(x, 20.0))
    total = 1.0 + power
    exact = total == 1.0
    small = tl.log(total) * (power / tl.where(exact, 1.0, total - 1.0))
    return tl.where(x > 20.0, x, tl.where(exact, power, small))


def compile_cases() -> list[CompileCase]:
    """Return the case of Jamba's states of 16 rows."""
    pointers = dict.fromkeys(("p_x", "p_step", "p_gate", "p_write", "p_read", "p_out"), "*bf16")
    pointers |= dict.fromkeys(("p_rate", "p_bias", "p_skip", "p_state"), "*fp32")
    pointers |= {"p_slot": "*i64", "p_has_state": "*i32", "p_start": "*i32"}
    constants = {"ROWS": 16, "CHANNELS": _CHANNELS}
    given = [key for key in scan.arg_names if key not in constants]
    return [
        CompileCase(
            "selective scan",
            scan,
            {key: pointers.get(key, "i32") for key in given},
            constants,
            num_warps=_WARPS,
            unaligned=frozenset(("p_slot", "p_has_state", "p_start")),
        )
    ]
