"""Building blocks of the attention kernels: row loads, a running softmax over a paged cache, row stores.

`D` is the width of a key and `V` of a value, each cut in two parts that are powers of two, the second possibly 0.
`SHARED`: a value is the first part of its key. BM rows of queries, BN keys at once, PLACES slots per block of the
cache.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
NO_SCORE = tl.constexpr(-1e29)  # less than a score, and more than UNSEEN
UNSEEN = tl.constexpr(-1e30)  # below every score, and finite, so that a difference of two is a number


@triton.jit
def load_rows(
    p_row,
    m_row,
    FIRST: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    MASKED: tl.constexpr = True,
):
    """Load entries FIRST … FIRST + SIZE of rows with WIDTH entries.

    Entries beyond the width and rows not in `m_row` are zero.
    """
    i_entry = FIRST + tl.arange(0, SIZE)
    p = p_row[:, None] + i_entry[None, :]
    if MASKED:
        b = tl.load(p, mask=m_row[:, None] & (i_entry < WIDTH)[None, :], other=0.0)
    elif FIRST + SIZE > WIDTH:
        b = tl.load(p, mask=(i_entry < WIDTH)[None, :], other=0.0)
    else:
        b = tl.load(p)
    return b  # [rows, SIZE]


@triton.jit
def store_rows(p_row, m_row, b_sum0, b_sum1, V: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """Write the rows in `m_row`, V entries each."""
    i_entry = tl.arange(0, V0)
    tl.store(p_row[:, None] + i_entry[None, :], b_sum0, mask=m_row[:, None] & (i_entry < V)[None, :])
    if V1:
        i_entry = V0 + tl.arange(0, V1)
        tl.store(p_row[:, None] + i_entry[None, :], b_sum1, mask=m_row[:, None] & (i_entry < V)[None, :])


@triton.jit
def start_sums(BM: tl.constexpr, V0: tl.constexpr, V1: tl.constexpr):
    """Return the sums of values before the first key, in their two parts."""
    b_sum0 = tl.zeros([BM, V0], tl.float32)
    b_sum1 = tl.zeros([BM, V1 if V1 else V0], tl.float32)
    return b_sum0, b_sum1


@triton.jit
def scores(
    b_q0,
    b_q1,
    b_k0,
    p_key,
    m_key,
    p_k_scale,
    p_v_scale,
    i_slot,
    D0: tl.constexpr,
    D1: tl.constexpr,
    D: tl.constexpr,
    SHARED: tl.constexpr,
    MASKED: tl.constexpr,
    SCALED: tl.constexpr,
):
    """Return products of queries and keys; the keys' first part is already loaded.

    If SCALED, a key has a scale. If SHARED as well, its first part, the value, has the value's scale and the rest the
    key's.
    """
    b_score = tl.dot(b_q0, tl.trans(b_k0), input_precision="ieee")  # [BM, BN]
    if SCALED and SHARED:
        b_score *= tl.load(p_v_scale + i_slot, mask=m_key, other=0.0)[None, :]
        b_k1 = load_rows(p_key, m_key, D0, D1, D, MASKED).to(b_q0.dtype)
        b_rest = tl.dot(b_q1, tl.trans(b_k1), input_precision="ieee")
        b_score += b_rest * tl.load(p_k_scale + i_slot, mask=m_key, other=0.0)[None, :]
    elif D1:
        b_k1 = load_rows(p_key, m_key, D0, D1, D, MASKED).to(b_q0.dtype)
        b_score = tl.dot(b_q1, tl.trans(b_k1), acc=b_score, input_precision="ieee")
    if SCALED and not SHARED:
        b_score *= tl.load(p_k_scale + i_slot, mask=m_key, other=0.0)[None, :]
    return b_score


@triton.jit
def first_seen(position, window, WINDOWED: tl.constexpr):
    """Return the first position that a query sees in a window (WINDOWED 1) or in its own chunk of positions (2)."""
    first = position // window * window if WINDOWED == 2 else position + 1 - window
    return tl.maximum(first, 0)


@triton.jit
def keys_before(position, shard, SHARDS: tl.constexpr):
    """Return how many keys of a shard are before a position: it has those with position % SHARDS == shard."""
    count = position
    if SHARDS > 1:
        count = (position + (SHARDS - 1) - shard) // SHARDS
    return count


@triton.jit
def first_key(position, window, WINDOWED: tl.constexpr, shard, SHARDS: tl.constexpr):
    """Return the first key of a shard that a query sees: 0 without a window."""
    first = position * 0
    if WINDOWED:
        first = keys_before(first_seen(position, window, WINDOWED), shard, SHARDS)
    return first


@triton.jit
def store_lse(p_lse, i_lse, m_row, b_max, b_total):
    """Write log Σ exp of the rows' scaled scores, of which the powers of 2 have these totals, unless p_lse is None.

    It is -inf for a row without scores.
    """
    if p_lse is not None:
        b_lse = (b_max + tl.log2(tl.where(b_total > 0, b_total, 1.0))) / LOG2_E
        tl.store(p_lse + i_lse, tl.where(b_max > NO_SCORE, b_lse, float("-inf")), mask=m_row)


@triton.jit
def attend(
    b_sum0,
    b_sum1,
    b_max,
    b_total,
    b_q0,
    b_q1,
    i_position,
    window,
    lowest,
    begin,
    end,
    factor,
    p_k,
    p_v,
    p_k_scale,
    p_v_scale,
    scale_block,
    p_table,
    k_block,
    k_place,
    v_block,
    v_place,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    SHARED: tl.constexpr,
    BN: tl.constexpr,
    MASKED: tl.constexpr,
    CAUSAL: tl.constexpr,
    WINDOWED: tl.constexpr,
    SCALED: tl.constexpr,
    shard=0,
    SHARDS: tl.constexpr = 1,
):
    """Add the keys at begin … end to the rows' sums of values, greatest scores and totals of weights.

    Weights are powers of 2. Unless MASKED, every key exists and every row sees it. With MASKED and CAUSAL, a row sees
    keys up to its position; with WINDOWED, from `first_seen` on, and nothing below `lowest` is read. If SCALED,
    each key and value has a scale, `scale_block` per block. With SHARDS, key i has the position i · SHARDS + shard.
    """
    for start in range(begin, end, BN):
        i_key = start + tl.arange(0, BN)
        m_key = i_key < end
        if WINDOWED:
            m_key &= i_key >= lowest
        if MASKED:
            i_block = tl.load(p_table + i_key // PLACES, mask=m_key, other=0).to(tl.int64)
        else:
            i_block = tl.load(p_table + i_key // PLACES).to(tl.int64)
        p_key = p_k + i_block * k_block + (i_key % PLACES) * k_place
        p_value = p_v + i_block * v_block + (i_key % PLACES) * v_place
        i_slot = i_block * scale_block + i_key % PLACES
        b_k0 = load_rows(p_key, m_key, 0, D0, D, MASKED).to(b_q0.dtype)
        b_score = scores(
            *(b_q0, b_q1, b_k0, p_key, m_key, p_k_scale, p_v_scale, i_slot),
            *(D0, D1, D, SHARED, MASKED, SCALED),
        )
        if MASKED:
            m_seen = m_key[None, :]
            i_at = i_key
            if SHARDS > 1:
                i_at = i_key * SHARDS + shard
            if CAUSAL:
                m_seen &= i_at[None, :] <= i_position[:, None]
            if WINDOWED:
                m_seen &= i_at[None, :] >= first_seen(i_position, window, WINDOWED)[:, None]
            b_score = tl.where(m_seen, b_score, float("-inf"))
        b_new = tl.maximum(b_max, tl.max(b_score, 1) * factor)
        b_weight = tl.exp2(b_score * factor - b_new[:, None])
        b_shrink = tl.exp2(b_max - b_new)
        b_total = b_total * b_shrink + tl.sum(b_weight, 1)
        b_max = b_new
        if SCALED:
            b_weight *= tl.load(p_v_scale + i_slot, mask=m_key, other=0.0)[None, :]
        b_weight = b_weight.to(b_q0.dtype)
        b_v0 = b_k0
        if not SHARED:
            b_v0 = load_rows(p_value, m_key, 0, V0, V, MASKED).to(b_q0.dtype)
        b_sum0 = tl.dot(b_weight, b_v0, acc=b_sum0 * b_shrink[:, None], input_precision="ieee")  # [BM, V0]
        if V1:
            b_v1 = load_rows(p_value, m_key, V0, V1, V, MASKED).to(b_q0.dtype)
            b_sum1 = tl.dot(b_weight, b_v1, acc=b_sum1 * b_shrink[:, None], input_precision="ieee")  # [BM, V1]
    return b_sum0, b_sum1, b_max, b_total
