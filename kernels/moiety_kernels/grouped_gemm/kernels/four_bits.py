"""Sums of products with 4-bit weights, widened in registers.

Of each 64 inputs a byte holds two that lie 32 apart. So the halves of a step's bytes are two groups of inputs, each
with one scale and contiguous in the rows, and no shuffle is needed. The width is a multiple of 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moiety_kernels.grouped_gemm.kernels.shared import load_weights, multiply


@triton.jit
def up_sums(
    p_row, m_row, w, p_scale, gate, up, expert, column, width, hidden, expert_stride, row_stride,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, ALIGNED: tl.constexpr,
    FOUR: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return gate and up, each plus the products of rows and an expert's weights from a column on.

    Without gates, ups are the only product, in the gates' place.
    """
    HALF: tl.constexpr = BK // 2
    num_groups = width // HALF
    num_rows = 2 * hidden if GATED else hidden  # of an expert
    i_weight = column + tl.arange(0, BN)
    m_weight = i_weight < hidden
    p_group = p_scale + (expert.to(tl.int64) * num_rows + i_weight) * num_groups
    for k in range(0, width, BK):
        p_half = p_row[:, None] + (k + tl.arange(0, HALF))[None, :]
        if ALIGNED:  # see rows in `up`
            p_half = tl.max_contiguous(tl.multiple_of(p_half, (1, 16)), (1, HALF))
        x_low = tl.load(p_half, mask=m_row[:, None], other=0.0)
        x_high = tl.load(p_half + HALF, mask=m_row[:, None], other=0.0)
        at, packed = k // 2, width // 2
        w_gate = load_weights(w, expert, column, at, num_rows, packed, expert_stride, row_stride, BN, HALF, TMA)
        p_step = p_group + k // HALF
        gate_low = tl.load(p_step, mask=m_weight, other=0.0)
        gate_high = tl.load(p_step + 1, mask=m_weight, other=0.0)
        low, high = widened_halves(w_gate, gate_low, gate_high, x_low.dtype, FOUR)
        gate = multiply(x_high, high, multiply(x_low, low, gate, SWAP), SWAP)
        if GATED:
            row = hidden + column
            w_up = load_weights(w, expert, row, at, num_rows, packed, expert_stride, row_stride, BN, HALF, TMA)
            up_low = tl.load(p_step + hidden * num_groups, mask=m_weight, other=0.0)
            up_high = tl.load(p_step + hidden * num_groups + 1, mask=m_weight, other=0.0)
            low, high = widened_halves(w_up, up_low, up_high, x_low.dtype, FOUR)
            up = multiply(x_high, high, multiply(x_low, low, up, SWAP), SWAP)
    if FOUR == "mxfp4":  # numbers are doubled
        gate *= 0.5
        up *= 0.5
    return gate, up


@triton.jit
def down_sums(
    inner, p_row, m_row, w, p_scale, sums, expert, first, column, width, hidden, expert_stride, row_stride,
    BN: tl.constexpr, BK: tl.constexpr, SWAP: tl.constexpr, TMA: tl.constexpr, ROWS_TMA: tl.constexpr,
    FOUR: tl.constexpr,
):  # fmt: skip
    """Return the sums plus the products of rows and an expert's weights from a column on."""
    HALF: tl.constexpr = BK // 2
    num_groups = hidden // HALF
    i_weight = column + tl.arange(0, BN)
    m_weight = i_weight < width
    p_group = p_scale + (expert.to(tl.int64) * width + i_weight) * num_groups
    for k in range(0, hidden, BK):
        if ROWS_TMA:
            low_rows = inner.load([first, k])
            high_rows = inner.load([first, k + HALF])
        else:
            p_half = p_row[:, None] + (k + tl.arange(0, HALF))[None, :]
            low_rows = tl.load(p_half, mask=m_row[:, None], other=0.0)
            high_rows = tl.load(p_half + HALF, mask=m_row[:, None], other=0.0)
        at, packed = k // 2, hidden // 2
        weights = load_weights(w, expert, column, at, width, packed, expert_stride, row_stride, BN, HALF, TMA)
        low_scale = tl.load(p_group + k // HALF, mask=m_weight, other=0.0)
        high_scale = tl.load(p_group + k // HALF + 1, mask=m_weight, other=0.0)
        low, high = widened_halves(weights, low_scale, high_scale, low_rows.dtype, FOUR)
        sums = multiply(high_rows, high, multiply(low_rows, low, sums, SWAP), SWAP)
    return sums * 0.5 if FOUR == "mxfp4" else sums


@triton.jit
def widened_halves(w, low_scale, high_scale, dtype: tl.constexpr, FOUR: tl.constexpr):
    """Widen bytes [BN, BK ÷ 2] of two 4-bit numbers each, and multiply each by its row's scale.

    Return the numbers in the lower halves, which are the first of a step's inputs, and those in the upper halves.
    """
    low = whole(w & 15, FOUR).to(dtype) * low_scale.to(dtype)[:, None]
    high = whole(w >> 4, FOUR).to(dtype) * high_scale.to(dtype)[:, None]
    return low, high


@triton.jit
def whole(nibbles, FOUR: tl.constexpr):
    """Return int8 numbers of 4-bit codes.

    For int4, subtract the offset 8. For mxfp4, return twice the number, which has a sign, two bits of exponent and one
    of significand: 0, 1, 2, 3, 4, 6, 8, 12.
    """
    if FOUR == "int4":
        numbers = nibbles.to(tl.int8) - 8
    else:
        exponent = (nibbles >> 1) & 3
        significand = nibbles & 1
        normal = (significand | 2) << (tl.maximum(exponent, 1) - 1)
        magnitude = tl.where(exponent > 0, normal, significand).to(tl.int8)
        numbers = tl.where(nibbles > 7, -magnitude, magnitude)
    return numbers
