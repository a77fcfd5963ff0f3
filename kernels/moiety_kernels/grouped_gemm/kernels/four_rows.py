"""Sums of a few rows' products with 4-bit weights, unpacked in registers.

Four bytes are read as one word, 16 bytes per thread. Masks turn each of a word's eight numbers in place into a 32-bit
float, with an exponent that matches its bit position. A chunk is 16 bytes of a row: of a pack of 64 inputs, 16 of the
first half, in the lower halves of bytes, and 16 of the second half, in the upper halves. Each half of a chunk has one
scale, so its products are summed first and scaled once. The width is a multiple of 64.
"""

from __future__ import annotations

import triton
import triton.language as tl

PACK: tl.constexpr = tl.constexpr(64)
CHUNK: tl.constexpr = tl.constexpr(32)  # inputs
# Bits below the exponent's make a subnormal float32, which arithmetic units multiply like any other. So an int4 number
# counts in units of 2⁻¹⁴⁹ times the value of its bit position, and an e2m1 number in units of 2⁻¹²⁶. The inputs are
# scaled by the inverse of the position and by part of the rest, so that products are in the middle of a float32's
# range; the sums are scaled by the remainder. Inputs of 2⁴⁸ and more overflow.
RAISED_INT4: tl.constexpr = tl.constexpr(80)  # powers of two
RAISED_MXFP4: tl.constexpr = tl.constexpr(2.0**60)
LOWERED_INT4: tl.constexpr = tl.constexpr(2.0 ** (149 - 80))
LOWERED_MXFP4: tl.constexpr = tl.constexpr(2.0 ** (126 - 60))
EIGHT_INT4: tl.constexpr = tl.constexpr(8 * 2.0 ** (80 - 149))  # offset from the true value, per unit of input


@triton.jit
def up_row_sums(
    p_x, p_w, p_scale, expert, i_column, m_column, width, hidden, expert_stride, row_stride,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FOUR: tl.constexpr, GATED: tl.constexpr,
):  # fmt: skip
    """Return gate and up of one row of x and its expert's columns, [BN] each. Strides are in words.

    Without gates, ups are the only product, in the gates' place, and the other is zero.
    """
    num_rows = 2 * hidden if GATED else hidden  # of an expert
    groups = width // PACK * 2
    p_gate = p_w + expert.to(tl.int64) * expert_stride + i_column.to(tl.int64) * row_stride
    p_up = p_gate + hidden.to(tl.int64) * row_stride
    p_gate_scale = p_scale + (expert.to(tl.int64) * num_rows + i_column) * groups
    p_up_scale = p_gate_scale + hidden.to(tl.int64) * groups
    gates = tl.zeros((BN, BK // CHUNK), dtype=tl.float32)
    ups = tl.zeros((BN, BK // CHUNK), dtype=tl.float32)
    for k in tl.range(0, width, BK, num_stages=STAGES):
        m_chunk = k + tl.arange(0, BK // CHUNK) * CHUNK < width
        low, high, low_excess, high_excess = inputs(p_x + k, m_chunk, 1.0, BK, FOUR)
        gates += scaled_sums(p_gate, p_gate_scale, k, m_column, m_chunk, low, high, low_excess, high_excess, BK, FOUR)
        if GATED:
            ups += scaled_sums(p_up, p_up_scale, k, m_column, m_chunk, low, high, low_excess, high_excess, BK, FOUR)
    return lowered(tl.sum(gates, axis=1), FOUR), lowered(tl.sum(ups, axis=1), FOUR)


@triton.jit
def down_row_sums(
    p_inner, p_w, p_scale, p_weight, p_expert, token, i_column, m_column, top_k, width, hidden, expert_stride,
    row_stride,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FOUR: tl.constexpr,
):  # fmt: skip
    """Return [BN]: the weighted sum of a token's rows, each times its expert's columns. Strides are in words."""
    groups = hidden // PACK * 2
    p_column = p_w + i_column.to(tl.int64) * row_stride
    p_column_scale = p_scale + i_column.to(tl.int64) * groups
    scale_stride = width.to(tl.int64) * groups
    sums = tl.zeros((BN, BK // CHUNK), dtype=tl.float32)
    steps = tl.cdiv(hidden, BK)
    for step in tl.range(0, top_k * steps, num_stages=STAGES):
        pair = token * top_k + step // steps
        k = step % steps * BK
        expert = tl.load(p_expert + pair).to(tl.int64)
        share = tl.load(p_weight + pair)
        m_chunk = (k + tl.arange(0, BK // CHUNK) * CHUNK < hidden) & (expert >= 0)  # experts on other ranks
        p_row = p_inner + pair.to(tl.int64) * hidden + k
        low, high, low_excess, high_excess = inputs(p_row, m_chunk, share, BK, FOUR)
        p_words, p_groups = p_column + expert * expert_stride, p_column_scale + expert * scale_stride
        sums += scaled_sums(p_words, p_groups, k, m_column, m_chunk, low, high, low_excess, high_excess, BK, FOUR)
    return lowered(tl.sum(sums, axis=1), FOUR)


@triton.jit
def inputs(p_row, m_chunk, share, BK: tl.constexpr, FOUR: tl.constexpr):
    """Return the scaled factors of a step's lower and upper halves, and the offsets of their sums.

    The factors are [chunks, 16] each. The offsets, [chunks] each, are the amounts by which the sums of products exceed
    the true sums.
    """
    i_chunk = tl.arange(0, BK // CHUNK)[:, None]
    i_byte = tl.arange(0, CHUNK // 2)
    p_low = p_row + i_chunk // 2 * PACK + i_chunk % 2 * (CHUNK // 2) + i_byte[None, :]
    low = tl.load(p_low, mask=m_chunk[:, None], other=0.0).to(tl.float32) * share
    high = tl.load(p_low + PACK // 2, mask=m_chunk[:, None], other=0.0).to(tl.float32) * share
    if FOUR == "int4":
        low_excess = tl.sum(low, axis=1) * EIGHT_INT4
        high_excess = tl.sum(high, axis=1) * EIGHT_INT4
        low *= power_of_two(-place(i_byte, 0) + RAISED_INT4)[None, :]
        high *= power_of_two(-place(i_byte, 4) + RAISED_INT4)[None, :]
    else:
        low_excess = tl.zeros((BK // CHUNK,), dtype=tl.float32)
        high_excess = low_excess
        low *= RAISED_MXFP4
        high *= RAISED_MXFP4
    return low, high, low_excess, high_excess


@triton.jit
def lowered(sums, FOUR: tl.constexpr):
    return sums * (LOWERED_INT4 if FOUR == "int4" else LOWERED_MXFP4)


@triton.jit
def power_of_two(exponent):
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def place(i_byte, HALF: tl.constexpr):
    """Return the bit position of a byte's number in `numbers`; an odd byte moves to the position of the byte before."""
    return i_byte % 4 // 2 * 16 + HALF


@triton.jit
def scaled_sums(
    p_column, p_scale, k, m_column, m_chunk, low, high, low_excess, high_excess, BK: tl.constexpr, FOUR: tl.constexpr
):
    """Return [BN, chunks]: the sum of each chunk's products in a step."""
    i_chunk = tl.arange(0, BK // CHUNK)
    m_w = m_column[:, None] & m_chunk[None, :]
    i_word = k // 8 + i_chunk[:, None] * (CHUNK // 8) + tl.arange(0, CHUNK // 8)[None, :]
    p_word = tl.max_contiguous(tl.multiple_of(p_column[:, None, None] + i_word[None], (1, 1, 16)), (1, 1, 4))
    words = tl.load(p_word, mask=m_w[:, :, None], other=0).to(tl.uint32, bitcast=True)
    i_group = k // CHUNK + (i_chunk // 2 * 2)[:, None] + tl.arange(0, 2)[None, :]
    scales = tl.load(p_scale[:, None, None] + i_group[None], mask=m_w[:, :, None], other=0.0)
    low_scale, high_scale = tl.split(scales)
    low_numbers, high_numbers = numbers(words, FOUR)
    low_sums = tl.sum(low_numbers * low[None], axis=2) - low_excess[None]
    high_sums = tl.sum(high_numbers * high[None], axis=2) - high_excess[None]
    return low_sums * low_scale + high_sums * high_scale


@triton.jit
def numbers(words, FOUR: tl.constexpr):
    """Return the numbers of words [BN, chunks, 4]: those in the lower halves of bytes and those in the upper halves.

    Each result is [BN, chunks, 16] float32 in the order of the bytes.
    """
    above = words >> 8
    low = in_order(number(words, 0, FOUR), number(above, 0, FOUR), number(words, 16, FOUR), number(above, 16, FOUR))
    high = in_order(number(words, 4, FOUR), number(above, 4, FOUR), number(words, 20, FOUR), number(above, 20, FOUR))
    return low, high


@triton.jit
def number(words, AT: tl.constexpr, FOUR: tl.constexpr):
    """Return the number in the four bits from AT on, in the scale that the comment on RAISED_INT4 describes."""
    if FOUR == "int4":
        bits = words & (15 << AT)
    else:  # moves three bits to exponent and significand and one to the sign, without overlap of the other number
        pair = words & (0x000F000F << (AT % 16))
        bits = (pair * (65 << (22 - AT))) & 0x81C00000
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_order(first, second, third, fourth):
    """Return [BN, chunks, 16] that interleaves four arrays of [BN, chunks, 4]."""
    joined = tl.join(tl.join(first, third), tl.join(second, fourth))
    return tl.reshape(joined, (first.shape[0], first.shape[1], 4 * first.shape[2]))
