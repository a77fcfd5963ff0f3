"""The Triton kernels for decode, which split each query's context over programs and merge the splits.

Each sequence has one query. Constants as in `softmax.py`; a split has at least LEAST positions, a sequence at most MOST
splits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from moiety_kernels.paged_attention.kernels.softmax import (
    LOG2_E,
    UNSEEN,
    attend,
    first_key,
    keys_before,
    load_rows,
    start_sums,
    store_lse,
    store_rows,
)


@triton.jit
def _visible(
    context,
    window,
    WINDOWED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BN: tl.constexpr,
    shard=0,
    SHARDS: tl.constexpr = 1,
):
    """Return (first key that a decode query sees, keys per split, splits). Without SHARDS a key is a position.

    They depend only on the sequence's own length, so that it is split alike in every batch.
    """
    lowest = first_key(context - 1, window, WINDOWED, shard, SHARDS)
    seen = keys_before(context, shard, SHARDS) - lowest
    length = tl.maximum(((seen + MOST - 1) // MOST + BN - 1) // BN * BN, LEAST)
    return lowest, length, tl.maximum((seen + length - 1) // length, 1)


@triton.jit
def _place(split, b_splits, b_end):
    """Return (sequence, split within it) of a split of the batch.

    `b_splits` holds each sequence's number of splits and `b_end` the end of its splits.
    """
    m_before = b_end <= split
    return tl.sum(m_before.to(tl.int32), 0), split - tl.sum(tl.where(m_before, b_splits, 0), 0)


@triton.jit(
    do_not_specialize=["num_sequences", "num_splits", "window", "table_row", "shard"],
    do_not_specialize_on_alignment=["p_start", "p_context", "p_table"],
)
def decode(
    p_q,
    p_k,
    p_v,
    p_out,
    p_part,
    p_weight,
    p_start,
    p_context,
    p_table,
    p_sink,
    p_k_scale,
    p_v_scale,
    num_sequences,
    num_heads,
    num_splits,
    window,
    factor,
    table_row,
    q_token,
    q_head,
    k_block,
    k_head,
    k_place,
    v_block,
    v_head,
    v_place,
    GROUP: tl.constexpr,
    PLACES: tl.constexpr,
    D: tl.constexpr,
    D0: tl.constexpr,
    D1: tl.constexpr,
    V: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOWED: tl.constexpr,
    SINKS: tl.constexpr,
    SCALED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    SPAN: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    p_lse=None,
    shard=0,
    SHARDS: tl.constexpr = 1,
):
    """Compute attention of the items (sequence, split, key-value head, tile of its rows).

    Each program takes every `num_programs`-th item. `p_lse`, if given, takes the LSE of each row.
    """
    TILES: tl.constexpr = (GROUP + BM - 1) // BM
    i_sequence = tl.arange(0, SPAN)
    m_sequence = i_sequence < num_sequences
    b_context = tl.load(p_context + i_sequence, mask=m_sequence, other=0)
    _, _, b_splits = _visible(b_context, window, WINDOWED, LEAST, MOST, BN, shard, SHARDS)
    b_splits = tl.where(m_sequence, b_splits, 0)
    b_end = tl.cumsum(b_splits, 0)
    num_tiles = num_heads // GROUP * TILES
    for item in range(tl.program_id(0), tl.sum(b_splits, 0) * num_tiles, tl.num_programs(0)):
        sequence, split = _place(item // num_tiles, b_splits, b_end)
        i_head = item % num_tiles // TILES
        context = tl.load(p_context + sequence)
        lowest, length, splits = _visible(context, window, WINDOWED, LEAST, MOST, BN, shard, SHARDS)
        begin = lowest + split * length
        i_row = item % TILES * BM + tl.arange(0, BM)
        m_row = i_row < GROUP
        i_query_head = i_head * GROUP + i_row
        token = tl.load(p_start + sequence).to(tl.int64)
        p_row = p_q + token * q_token + i_query_head * q_head
        b_q0 = load_rows(p_row, m_row, 0, D0, D)
        b_q1 = b_q0
        if D1:
            b_q1 = load_rows(p_row, m_row, D0, D1, D)
        p_k_head, p_v_head = p_k_scale, p_v_scale
        if SCALED:
            p_k_head += i_head * PLACES
            p_v_head += i_head * PLACES
        b_max = tl.full([BM], UNSEEN, tl.float32)
        b_total = tl.zeros([BM], tl.float32)
        if SINKS:
            b_sink = tl.load(p_sink + i_query_head, mask=m_row, other=0.0) * LOG2_E
            b_max = tl.where(split == 0, b_sink, b_max)
            b_total += tl.where(split == 0, 1.0, 0.0)
        b_sum0, b_sum1 = start_sums(BM, V0, V1)
        b_sum0, b_sum1, b_max, b_total = attend(
            *(b_sum0, b_sum1, b_max, b_total, b_q0, b_q1, i_row, window),
            *(begin, begin, tl.minimum(begin + length, keys_before(context, shard, SHARDS)), factor),
            *(p_k + i_head.to(tl.int64) * k_head, p_v + i_head.to(tl.int64) * v_head),
            *(p_k_head, p_v_head, num_heads // GROUP * PLACES),
            *(p_table + sequence.to(tl.int64) * table_row, k_block, k_place, v_block, v_place),
            *(PLACES, D, D0, D1, V, V0, V1, SHARED, BN, True, False, False, SCALED),
        )
        b_total = tl.where(b_total > 0, b_total, 1.0)  # an empty context has no visible position
        b_scale = 1.0 / b_total
        b_sum0 *= b_scale[:, None]
        b_sum1 *= b_scale[:, None]
        i_part = (sequence.to(tl.int64) * num_splits + split) * num_heads + i_query_head
        p_row = p_out + (token * num_heads + i_query_head) * V
        direct = splits == 1
        if SHARED:  # rows so wide that registers do not suffice for two outputs
            direct = False
        if direct:
            store_rows(p_row, m_row, b_sum0, b_sum1, V, V0, V1)
            store_lse(p_lse, token * num_heads + i_query_head, m_row, b_max, b_total)
        else:
            store_rows(p_part + i_part * V, m_row, b_sum0, b_sum1, V, V0, V1)
            tl.store(p_weight + i_part, b_max + tl.log2(b_total), mask=m_row)


@triton.jit(
    do_not_specialize=["num_splits", "window", "shard"], do_not_specialize_on_alignment=["p_start", "p_context"]
)
def merge(
    p_part,
    p_weight,
    p_out,
    p_start,
    p_context,
    num_heads,
    num_splits,
    window,
    V: tl.constexpr,
    V0: tl.constexpr,
    V1: tl.constexpr,
    SHARED: tl.constexpr,
    WINDOWED: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    BN: tl.constexpr,
    ROWS: tl.constexpr,
    p_lse=None,
    shard=0,
    SHARDS: tl.constexpr = 1,
):
    """Sum a sequence's splits by their weights, always in their order."""
    sequence = tl.program_id(0)
    context = tl.load(p_context + sequence)
    _, _, splits = _visible(context, window, WINDOWED, LEAST, MOST, BN, shard, SHARDS)
    if splits == 1 and not SHARED:
        return
    i_query_head = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    m_row = i_query_head < num_heads
    b_max = tl.full([ROWS], UNSEEN, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    b_sum0, b_sum1 = start_sums(ROWS, V0, V1)
    for split in range(splits):
        i_part = (sequence.to(tl.int64) * num_splits + split) * num_heads + i_query_head
        b_weight = tl.load(p_weight + i_part, mask=m_row, other=0.0)
        b_new = tl.maximum(b_max, b_weight)
        b_shrink = tl.exp2(b_max - b_new)
        b_share = tl.exp2(b_weight - b_new)
        b_sum0 = b_sum0 * b_shrink[:, None] + load_rows(p_part + i_part * V, m_row, 0, V0, V) * b_share[:, None]
        if V1:
            b_sum1 = b_sum1 * b_shrink[:, None] + load_rows(p_part + i_part * V, m_row, V0, V1, V) * b_share[:, None]
        b_total = b_total * b_shrink + b_share
        b_max = b_new
    token = tl.load(p_start + sequence).to(tl.int64)
    p_row = p_out + (token * num_heads + i_query_head) * V
    store_rows(p_row, m_row, b_sum0 / b_total[:, None], b_sum1 / b_total[:, None], V, V0, V1)
    store_lse(p_lse, token * num_heads + i_query_head, m_row, b_max, b_total)
