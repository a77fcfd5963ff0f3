"""The Triton kernel for prefill chunks. Constants as in `softmax.py`.

A tile's rows are queries × the query heads that share a key-value head: row r is query r // GROUP, head r % GROUP.
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
def _locate(p_start, tile, num_sequences, GROUP: tl.constexpr, BM: tl.constexpr):
    """Return (sequence, tile within it) of a tile of the batch.

    Sequence s has the tiles from floor(its first row / BM) + s on: as many as it needs, possibly one more, without a
    count.
    """
    base = tl.load(p_start)
    low = 0
    high = num_sequences
    while low + 1 < high:
        middle = (low + high) // 2
        if (tl.load(p_start + middle) - base) * GROUP // BM + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(p_start + low) - base) * GROUP // BM - low


@triton.jit(
    do_not_specialize=["num_sequences", "window", "table_row", "shard"],
    do_not_specialize_on_alignment=["p_start", "p_context", "p_table"],
)
def prefill(
    p_q,
    p_k,
    p_v,
    p_out,
    p_start,
    p_context,
    p_table,
    p_sink,
    p_k_scale,
    p_v_scale,
    num_sequences,
    num_heads,
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
    BM: tl.constexpr,
    BN: tl.constexpr,
    p_lse=None,
    shard=0,
    SHARDS: tl.constexpr = 1,
):
    """Compute one tile of rows and one key-value head per program; the last tiles, which see most keys, run first.

    `p_lse`, if given, takes the LSE of each row.
    """
    num_kv_heads = num_heads // GROUP
    i_head = tl.program_id(0) % num_kv_heads
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // num_kv_heads
    sequence, tile = _locate(p_start, tile, num_sequences, GROUP, BM)
    token = tl.load(p_start + sequence)
    num_rows = (tl.load(p_start + sequence + 1) - token) * GROUP
    if tile * BM >= num_rows:
        return
    earlier = tl.load(p_context + sequence) - num_rows // GROUP
    i_row = tile * BM + tl.arange(0, BM)
    m_row = i_row < num_rows
    i_position = earlier + i_row // GROUP
    i_token = (token + i_row // GROUP).to(tl.int64)
    i_query_head = i_head * GROUP + i_row % GROUP
    p_row = p_q + i_token * q_token + i_query_head * q_head
    b_q0 = load_rows(p_row, m_row, 0, D0, D)
    b_q1 = b_q0
    if D1:
        b_q1 = load_rows(p_row, m_row, D0, D1, D)
    b_max = tl.full([BM], UNSEEN, tl.float32)
    b_total = tl.zeros([BM], tl.float32)
    if SINKS:
        b_max = tl.load(p_sink + i_query_head) * LOG2_E
        b_total += 1.0
    p_k += i_head.to(tl.int64) * k_head
    p_v += i_head.to(tl.int64) * v_head
    if SCALED:
        p_k_scale += i_head * PLACES
        p_v_scale += i_head * PLACES
    scale_block = num_kv_heads * PLACES
    p_table += sequence.to(tl.int64) * table_row
    first = earlier + tile * BM // GROUP
    last = earlier + (tl.minimum(num_rows, (tile + 1) * BM) - 1) // GROUP
    # Keys are processed in blocks at fixed positions: first those that some rows no longer see, then those that all
    # rows see, last those that some rows do not see yet. Where registers are short, one loop handles all three.
    lowest = first_key(first, window, WINDOWED, shard, SHARDS)
    begin = lowest // BN * BN
    b_sum0, b_sum1 = start_sums(BM, V0, V1)
    if not SHARED:
        end_all = tl.maximum(keys_before(first + 1, shard, SHARDS) // BN * BN, begin)
        if WINDOWED:
            seen_by_all = first_key(last, window, WINDOWED, shard, SHARDS)
            begin_all = tl.minimum((seen_by_all + BN - 1) // BN * BN, end_all)
            b_sum0, b_sum1, b_max, b_total = attend(
                *(b_sum0, b_sum1, b_max, b_total, b_q0, b_q1, i_position, window, lowest, begin, begin_all, factor),
                *(p_k, p_v, p_k_scale, p_v_scale, scale_block, p_table, k_block, k_place, v_block, v_place),
                *(PLACES, D, D0, D1, V, V0, V1, SHARED, BN, True, True, WINDOWED, SCALED, shard, SHARDS),
            )
            begin = begin_all
        b_sum0, b_sum1, b_max, b_total = attend(
            *(b_sum0, b_sum1, b_max, b_total, b_q0, b_q1, i_position, window, lowest, begin, end_all, factor),
            *(p_k, p_v, p_k_scale, p_v_scale, scale_block, p_table, k_block, k_place, v_block, v_place),
            *(PLACES, D, D0, D1, V, V0, V1, SHARED, BN, False, False, False, SCALED),
        )
        begin = end_all
    b_sum0, b_sum1, b_max, b_total = attend(
        *(b_sum0, b_sum1, b_max, b_total, b_q0, b_q1, i_position, window, lowest, begin),
        *(keys_before(last + 1, shard, SHARDS), factor),
        *(p_k, p_v, p_k_scale, p_v_scale, scale_block, p_table, k_block, k_place, v_block, v_place),
        *(PLACES, D, D0, D1, V, V0, V1, SHARED, BN, True, True, WINDOWED, SCALED, shard, SHARDS),
    )
    b_scale = 1.0 / tl.where(m_row & (b_total > 0), b_total, 1.0)  # a row may see no key of a shard
    p_row = p_out + (i_token * num_heads + i_query_head) * V
    store_rows(p_row, m_row, b_sum0 * b_scale[:, None], b_sum1 * b_scale[:, None], V, V0, V1)
    store_lse(p_lse, i_token * num_heads + i_query_head, m_row, b_max, b_total)
