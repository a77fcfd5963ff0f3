"""Shared device functions of the grouped products: tile order, weights, products, activations."""

from __future__ import annotations

import triton
import triton.language as tl

from moiety_kernels.quantization import weight as quantization

SCALE_BLOCK: tl.constexpr = tl.constexpr(quantization.SCALE_BLOCK)


@triton.jit
def place(index, num_tiles, num_blocks, GROUP: tl.constexpr):
    """Return (tile, block of columns) of a piece of work.

    GROUP tiles traverse the blocks together, so that tiles of one expert share its weights in L2.
    """
    first = index // (GROUP * num_blocks) * GROUP
    size = tl.minimum(num_tiles - first, GROUP)
    within = index - first * num_blocks
    return first + within % size, within // size


@triton.jit
def load_weights(
    w, expert, row, k, num_rows, width, expert_stride, row_stride, BN: tl.constexpr, BK: tl.constexpr, TMA: tl.constexpr
):
    """Load [BN, BK] of an expert's weights from (row, k) on, by the copy engine or by addresses.

    Columns beyond the width are zero.
    """
    if TMA:
        # One descriptor spans all experts, so none is made in the loop. Rows beyond an expert's are the next expert's;
        # their results are not stored.
        weights = w.load([expert * num_rows + row, k])
    else:
        i_row = row + tl.arange(0, BN)
        i_k = k + tl.arange(0, BK)
        p_row = w + expert.to(tl.int64) * expert_stride + i_row.to(tl.int64) * row_stride
        m_w = (i_row < num_rows)[:, None] & (i_k < width)[None, :]
        weights = tl.load(p_row[:, None] + i_k[None, :], mask=m_w, other=0.0)
    return weights


@triton.jit
def multiply(x, w, acc, SWAP: tl.constexpr):
    """Return acc + x · wᵀ, or its transpose if SWAP, so that the tensor cores' 64 rows are weights and not tokens."""
    return tl.dot(w, x.T, acc, input_precision="ieee") if SWAP else tl.dot(x, w.T, acc, input_precision="ieee")


@triton.jit
def multiply_scaled(x, w, acc, row_scale, w_scale, SWAP: tl.constexpr, SCALES: tl.constexpr, EIGHT: tl.constexpr):
    """Return the result of `multiply` with weights that may be narrower than x.

    Weights are widened in registers, which are the operands of swapped products. Scales of blocks are applied to each
    step's sums; scales of rows are applied once, by the caller.

    EIGHT: both are float8, and a step is the columns that share a row's scale. The tensor cores accumulate such
    products in few bits, so a step's sums are scaled and added to the total in float32.
    """
    if EIGHT:
        acc += tl.dot(x, w.T) * (row_scale * w_scale)[:, None]
    elif SCALES == "block":
        step = multiply(x, w.to(x.dtype), tl.zeros_like(acc), SWAP)
        acc += step * w_scale
    else:
        acc = multiply(x, w.to(x.dtype), acc, SWAP)
    return acc


@triton.jit
def to_eight_bits(values):
    """Return (float8_e4m3fn, scales) of float32 rows; each scale maps its row's largest number to 448."""
    largest = tl.max(tl.abs(values), axis=1)
    largest = tl.where(largest > 0.0, largest, 1.0)
    rounded = (values * tl.div_rn(448.0, largest)[:, None]).to(tl.float8e4nv)
    return rounded, tl.div_rn(largest, 448.0)


@triton.jit
def empty_sums(BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr):
    """Return zeros [BM, BN], or the transpose if SWAP."""
    return tl.zeros((BN, BM), dtype=tl.float32) if SWAP else tl.zeros((BM, BN), dtype=tl.float32)


@triton.jit
def along_columns(vector, SWAP: tl.constexpr):
    """Return a value per column, shaped to broadcast over sums."""
    return vector[:, None] if SWAP else vector[None, :]


@triton.jit
def activate(gate, up, limit, alpha, ACTIVATION: tl.constexpr):
    if ACTIVATION == "silu":
        inner = gate * tl.sigmoid(gate) * up
    elif ACTIVATION == "scaled_silu":
        inner = alpha * gate * tl.sigmoid(alpha * gate) * up
    elif ACTIVATION == "gelu_tanh":
        # tanh(z) = 2 · sigmoid(2z) - 1
        inner = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)) * up
    elif ACTIVATION == "relu2":  # without a gate, the only product is in its place
        inner = tl.maximum(gate, 0.0) * tl.maximum(gate, 0.0)
    else:
        gate = tl.minimum(gate, limit)
        up = tl.maximum(tl.minimum(up, limit), -limit)
        if ACTIVATION == "limited_silu":
            inner = gate * tl.sigmoid(gate) * up
        else:
            inner = (up + 1.0) * gate * tl.sigmoid(alpha * gate)
    return inner
