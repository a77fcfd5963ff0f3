"""Parts that the Triton kernels of linear attention share: a sequence's tokens and state, and the rows of a chunk.

K width of a key, C tokens of a chunk.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def token_range(p_start, i_sequence):
    """Return (first token, end) of a sequence."""
    return tl.load(p_start + i_sequence).to(tl.int64), tl.load(p_start + i_sequence + 1).to(tl.int64)


@triton.jit
def load_state(
    p_state, p_slot, p_has_state, i_sequence, i_head, i_key, i_column, slot_stride,
    WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """Return (addresses, values) of some columns of one head's state, [K, columns]; zeros if there is no state yet."""
    p_own = p_state + tl.load(p_slot + i_sequence) * slot_stride + i_head * WIDTH * VALUE_WIDTH
    p_own += i_key[:, None] * VALUE_WIDTH + i_column[None, :]
    has_state = tl.load(p_has_state + i_sequence) != 0
    return p_own, tl.load(p_own, mask=has_state & (i_key >= 0)[:, None], other=0.0)


@triton.jit
def load_chunk(p_row, i_entry, m_token):
    """Return entries of a chunk's rows, [C, entries]; zeros for tokens that are not in `m_token`."""
    return tl.load(p_row[:, None] + i_entry[None, :], mask=m_token[:, None], other=0.0)


@triton.jit
def store_chunk(p_row, i_entry, values, m_token):
    """Store entries of a chunk's rows, [C, entries], for the tokens in `m_token`."""
    tl.store(p_row[:, None] + i_entry[None, :], values.to(p_row.dtype.element_ty), mask=m_token[:, None])


@triton.jit
def decay_between(total, m_pair):
    """Return e^(total_i - total_j), [C, C], for the pairs in `m_pair`, and 1 for others; `total` sums the gates."""
    return tl.exp(tl.where(m_pair, total[:, None] - total[None, :], 0.0))
