"""The selection of tokens in Triton: `score` writes the scores of all tokens in the context, `select` the largest ones.

T tokens, S sequences, B blocks per row, H index queries per token, I width of an index key, N blocks, P slots per
block, K most tokens that a query selects, C longest context.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl

from moiety_kernels.gpu.cases import CompileCase

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.paged_attention.inputs import AttentionMetadata

MAX_WIDTH = 256
MAX_HEADS = 128
_TILES = {2: (128, 4), 4: (16, 8)}  # keys that a program scores, and its warps, by the bytes of a key's entry
_BLOCK = 1024  # scores that `select` reads at once
_SELECT_WARPS = 8
_SCORE_BYTES = 256 << 20  # of the scores of the rows that are scored by one launch


def fits(q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor) -> bool:
    """Return whether the kernels support these tensors."""
    return (
        q_THI.dtype is keys_NPI.dtype
        and q_THI.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and fits_widths(q_THI.shape[1], q_THI.shape[2])
        and q_THI.stride(2) == keys_NPI.stride(2) == weight_TH.stride(1) == 1
    )


def fits_widths(heads: int, width: int) -> bool:
    """Return whether the kernels support so many index queries and index keys of this width."""
    return heads <= MAX_HEADS and width <= MAX_WIDTH


def select_tokens(
    q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor, metadata: AttentionMetadata, width: int
) -> tuple[Tensor, Tensor]:
    """Return (slot_TK, count_T) with K = `width`; launches depend only on shapes and `max_context`."""
    (tokens, heads, index_width), max_context = q_THI.shape, metadata.max_context
    query_start_S1, context_len_S = metadata.query_start_S1, metadata.context_len_S
    block_table_SB = metadata.block_table_SB
    device, (keys, num_warps) = q_THI.device, _TILES[q_THI.itemsize]
    slot_TK = torch.empty(tokens, width, dtype=torch.int32, device=device)
    count_T = torch.empty(tokens, dtype=torch.int32, device=device)
    token_T = torch.arange(tokens, dtype=torch.int32, device=device)
    sequence_T = torch.searchsorted(query_start_S1[1:], token_T, right=True, out_int32=True)
    sequence_T = sequence_T.clamp(max=context_len_S.shape[0] - 1)  # no token is read beyond the last sequence's
    context_T = context_len_S[sequence_T]
    seen_T = torch.minimum(context_T - query_start_S1[sequence_T + 1] + token_T + 1, context_T)
    length = triton.cdiv(max_context, _BLOCK) * _BLOCK if max_context > width else 0
    rows = max(1, min(tokens, _SCORE_BYTES // (4 * max(1, length))))
    score_RC = torch.empty(rows, length, dtype=torch.float32, device=device)
    for first in range(0, tokens, rows):
        count = min(rows, tokens - first)
        of_rows = sequence_T[first:], seen_T[first:], block_table_SB
        if length:
            score[(count, triton.cdiv(max_context, keys))](
                q_THI[first:],
                weight_TH[first:],
                keys_NPI,
                score_RC,
                *of_rows,
                width,
                length,
                q_THI.stride(0),
                q_THI.stride(1),
                weight_TH.stride(0),
                *keys_NPI.stride()[:2],
                block_table_SB.stride(0),
                **_constants(heads, index_width, keys_NPI.shape[1], keys),
                num_warps=num_warps,
            )
        select[(count,)](
            score_RC,
            slot_TK[first:],
            count_T[first:],
            *of_rows,
            width,
            length,
            block_table_SB.stride(0),
            PLACES=keys_NPI.shape[1],
            BLOCK=_BLOCK,
            num_warps=_SELECT_WARPS,
        )
    return slot_TK, count_T


def _constants(heads: int, width: int, places: int, keys: int) -> dict[str, int]:
    return {
        "HEADS": heads, "HEADS_UP": max(16, triton.next_power_of_2(heads)), "WIDTH": width,
        "WIDTH_UP": max(16, triton.next_power_of_2(width)), "PLACES": places, "KEYS": keys,
    }  # fmt: skip


_SCALARS = ["top_k", "score_row", "table_row"]


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["p_sequence", "p_seen", "p_table"])
def score(
    p_q,
    p_weight,
    p_key,
    p_score,
    p_sequence,
    p_seen,
    p_table,
    top_k,
    score_row,
    q_token,
    q_head,
    weight_token,
    key_block,
    key_place,
    table_row,
    HEADS: tl.constexpr,
    HEADS_UP: tl.constexpr,
    WIDTH: tl.constexpr,
    WIDTH_UP: tl.constexpr,
    PLACES: tl.constexpr,
    KEYS: tl.constexpr,
):
    """Score KEYS tokens for one query. Queries that see no more than `top_k` tokens need no scores."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(p_seen + token)
    start = tl.program_id(1) * KEYS
    if (seen <= top_k) | (start >= seen):
        return
    i_head = tl.arange(0, HEADS_UP)
    i_entry = tl.arange(0, WIDTH_UP)
    m_head = i_head < HEADS
    m_entry = i_entry < WIDTH
    p_query = p_q + token * q_token + i_head[:, None] * q_head + i_entry[None, :]
    b_q = tl.load(p_query, mask=m_head[:, None] & m_entry[None, :], other=0.0)  # [HEADS_UP, WIDTH_UP]
    b_weight = tl.load(p_weight + token * weight_token + i_head, mask=m_head, other=0.0)
    i_key = start + tl.arange(0, KEYS)
    m_key = i_key < seen
    p_row = p_table + tl.load(p_sequence + token).to(tl.int64) * table_row
    block = tl.load(p_row + i_key // PLACES, mask=m_key, other=0).to(tl.int64)
    p_keys = p_key + block * key_block + i_key % PLACES * key_place
    b_key = tl.load(p_keys[:, None] + i_entry[None, :], mask=m_key[:, None] & m_entry[None, :], other=0.0)
    b_product = tl.dot(b_q, tl.trans(b_key), input_precision="ieee")  # [HEADS_UP, KEYS]
    b_score = tl.sum(tl.maximum(b_product, 0.0) * b_weight[:, None], axis=0)
    tl.store(p_score + token * score_row + i_key, b_score + 0.0, mask=m_key)


@triton.jit
def _ordered(b_score):
    """Return unsigned numbers that are larger for larger scores."""
    b_bits = b_score.to(tl.uint32, bitcast=True)
    return tl.where(b_bits >> 31 == 1, b_bits ^ 0xFFFFFFFF, b_bits | 0x80000000)


@triton.jit(do_not_specialize=_SCALARS, do_not_specialize_on_alignment=["p_out", "p_count", "p_sequence", "p_seen"])
def select(
    p_score,
    p_out,
    p_count,
    p_sequence,
    p_seen,
    p_table,
    top_k,
    score_row,
    table_row,
    PLACES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the slots of one query's tokens: a radix select, eight bits of the scores at a time, then a compaction."""
    token = tl.program_id(0).to(tl.int64)
    seen = tl.load(p_seen + token)
    count = tl.minimum(seen, top_k)
    tl.store(p_count + token, count)
    p_row = p_table + tl.load(p_sequence + token).to(tl.int64) * table_row
    p_own = p_score + token * score_row
    i_bin = tl.arange(0, 256)
    is_whole = seen <= top_k
    # The `top_k`-th largest score, of which `left` equals are among the largest.
    found = tl.zeros([], tl.uint32)
    left = count
    if not is_whole:
        for digit in tl.static_range(4):
            b_total = tl.zeros([256], tl.int32)
            for start in range(0, seen, BLOCK):
                i_key = start + tl.arange(0, BLOCK)
                b_value = _ordered(tl.load(p_own + i_key, mask=i_key < seen, other=0.0))
                m_here = i_key < seen
                if digit > 0:
                    m_here = m_here & (b_value >> (32 - 8 * digit) == found)
                b_digit = (b_value >> (24 - 8 * digit) & 255).to(tl.int32)
                b_total += tl.histogram(b_digit, 256, mask=m_here)
            b_larger = tl.sum(b_total, axis=0) - tl.cumsum(b_total, axis=0)  # scores with a larger digit
            chosen = tl.min(tl.where(b_larger < left, i_bin, 255), axis=0)
            left -= tl.sum(tl.where(i_bin > chosen, b_total, 0), axis=0)
            found = (found << 8) | chosen.to(tl.uint32)
    num_taken = count * 0
    num_equal = count * 0
    for start in range(0, seen, BLOCK):
        i_key = start + tl.arange(0, BLOCK)
        m_key = i_key < seen
        m_take = m_key
        if not is_whole:
            b_value = _ordered(tl.load(p_own + i_key, mask=m_key, other=0.0))
            m_equal = m_key & (b_value == found)
            b_rank = num_equal + tl.cumsum(m_equal.to(tl.int32), axis=0)
            m_take = m_key & ((b_value > found) | (m_equal & (b_rank <= left)))
            num_equal += tl.sum(m_equal.to(tl.int32), axis=0)
        i_out = num_taken + tl.cumsum(m_take.to(tl.int32), axis=0) - 1
        block = tl.load(p_row + i_key // PLACES, mask=m_take, other=0)
        tl.store(p_out + token * top_k + i_out, block * PLACES + i_key % PLACES, mask=m_take)
        num_taken += tl.sum(m_take.to(tl.int32), axis=0)


def compile_cases() -> list[CompileCase]:
    """Return the cases of DeepSeek-V3.2's 64 and GLM-5's 32 index queries of 128."""
    types = {"p_weight": "*fp32", "p_score": "*fp32"}
    types |= dict.fromkeys(("p_out", "p_count", "p_sequence", "p_seen", "p_table"), "*i32")
    unaligned = frozenset((*_SCALARS, "p_out", "p_count", "p_sequence", "p_seen", "p_table"))

    def case(name: str, kernel: Any, constants: dict[str, int], num_warps: int, dtype: str = "bf16") -> CompileCase:
        known = {key: value for key, value in constants.items() if key in kernel.arg_names}
        given = {
            one: f"*{dtype}" if one in ("p_q", "p_key") else types.get(one, "i32")
            for one in kernel.arg_names
            if one not in known
        }
        return CompileCase(name, kernel, given, known, num_warps, unaligned=unaligned)

    keys, num_warps = _TILES[2]
    found = [case(f"score {heads} heads", score, _constants(heads, 128, 16, keys), num_warps) for heads in (32, 64)]
    keys, num_warps = _TILES[4]
    found.append(case("score 64 heads, float32", score, _constants(64, 128, 16, keys), num_warps, "fp32"))
    return [*found, case("select", select, {"PLACES": 16, "BLOCK": _BLOCK}, _SELECT_WARPS)]
