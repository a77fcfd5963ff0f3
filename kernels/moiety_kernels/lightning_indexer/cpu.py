"""The selection of tokens on a CPU: a task is one query, which scores its whole context and selects from it.

Scores of a chunk of tokens are products with all index queries at once, then summed over them in order; the selection
is a radix select over the scores' bits. So a query's selection depends on nothing but the query and its context.

T tokens, S sequences, B blocks per row, H index queries per token, I width of an index key, N blocks, P slots per
block, K most tokens that a query selects.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.gemm import ROWS_AT, TEMP_AT, multiply_narrow, multiply_wide
from moiety_kernels.cpu.memory import load_f32, load_i32, load_i64, store_f32, store_i32, store_i64
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.team import MAX_TASKS, SCRATCH_BYTES, team
from moiety_kernels.cpu.values import LANES, Float, Floats, Int

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.paged_attention.inputs import AttentionMetadata

CHUNK = 256  # tokens that are scored at once
_MAX_HEADS = 1024
_DIGITS = 256  # of a pass of the radix select
_COUNTS_AT = TEMP_AT
_CHUNK_AT = _COUNTS_AT + 8 * _DIGITS


class SelectArguments(NamedTuple):
    """Arguments of the selection."""

    q_THI: Address  # float32
    weight_TH: Address  # float32, contiguous
    keys_NPI: Address  # float32 or bfloat16, contiguous
    query_start_S1: Address  # int32, as the rest
    context_len_S: Address
    block_table_SB: Address
    slot_TK: Address
    count_T: Address
    q_stride: Int64  # bytes from one token to the next
    sequences: Int64
    table_width: Int64
    heads: Int64
    width: Int64  # I
    places: Int64
    itemsize: Int64  # of keys
    most: Int64  # K


def fits(q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor, metadata: AttentionMetadata) -> bool:
    """Return whether `select_tokens` supports these tensors."""
    tokens, heads, width = q_THI.shape
    return (
        q_THI.dtype is torch.float32
        and keys_NPI.dtype in (torch.float32, torch.bfloat16)
        and metadata.block_table_SB.dtype is torch.int32
        and width % LANES == 0
        and heads <= _MAX_HEADS
        and q_THI.stride()[1:] == (width, 1)
        and weight_TH.is_contiguous()
        and keys_NPI.is_contiguous()
        and metadata.block_table_SB.stride(1) == 1
        and 0 < tokens < MAX_TASKS
        and _CHUNK_AT + 4 * (CHUNK * heads + metadata.max_context + LANES) <= SCRATCH_BYTES
    )


def select_tokens(
    q_THI: Tensor, weight_TH: Tensor, keys_NPI: Tensor, metadata: AttentionMetadata, width: int
) -> tuple[Tensor, Tensor]:
    """Return (slot_TK, count_T) with K = `width`."""
    tokens = q_THI.shape[0]
    slot_TK, count_T = torch.empty(tokens, width, dtype=torch.int32), torch.empty(tokens, dtype=torch.int32)
    args = SelectArguments(
        q_THI=q_THI.data_ptr(),
        weight_TH=weight_TH.data_ptr(),
        keys_NPI=keys_NPI.data_ptr(),
        query_start_S1=metadata.query_start_S1.data_ptr(),
        context_len_S=metadata.context_len_S.data_ptr(),
        block_table_SB=metadata.block_table_SB.data_ptr(),
        slot_TK=slot_TK.data_ptr(),
        count_T=count_T.data_ptr(),
        q_stride=4 * q_THI.stride(0),
        sequences=metadata.context_len_S.shape[0],
        table_width=metadata.block_table_SB.stride(0),
        heads=q_THI.shape[1],
        width=q_THI.shape[2],
        places=keys_NPI.shape[1],
        itemsize=keys_NPI.itemsize,
        most=width,
    )
    team().run(_task, tokens, args)
    return slot_TK, count_T


def _add_positive(e: Emitter, row: Floats, count: Int, weight: Float, out: Floats) -> None:
    """Emit out[i] += weight · max(row[i], 0)."""
    factor, zero = e.splat(weight), e.constant(0.0)
    for i in e.loop(count, LANES):
        out[i] = e.fma(e.larger(row[i], zero), factor, out[i])


add_positive = function("moiety_add_positive", _add_positive)


@jit
def _slot(args: SelectArguments, table: int, position: int) -> int:
    places = args.places
    slot: int = load_i32(table, position // places) * places + position % places
    return slot


@jit
def _score(args: SelectArguments, token: int, table: int, seen: int, scratch: int, scores: int) -> None:
    """Write the scores of the first `seen` tokens of the sequence, a chunk at a time."""
    heads, width, places, size = args.heads, args.width, args.places, args.itemsize
    rows, chunk = scratch + ROWS_AT, scratch + _CHUNK_AT
    for h in range(heads):
        store_i64(rows, h, args.q_THI + token * args.q_stride + 4 * h * width)
    stride = size * width
    for start in range(0, seen, CHUNK):
        count, j = min(CHUNK, seen - start), 0
        while j < count:
            run = min(places - (start + j) % places, count - j)
            key = args.keys_NPI + _slot(args, table, start + j) * stride
            if size == 4:
                multiply_wide(rows, heads, key, stride, run, width, chunk + 4 * j, 4 * CHUNK)
            else:
                multiply_narrow(rows, heads, key, run, width, chunk + 4 * j, 4 * CHUNK)
            j += run
        padded = (count + LANES - 1) // LANES * LANES
        for j in range(padded):
            store_f32(scores, start + j, 0.0)
        for h in range(heads):
            row, weight = chunk + 4 * CHUNK * h, load_f32(args.weight_TH, token * heads + h)
            add_positive(row, padded, weight, scores + 4 * start)


@jit
def _ordered(scores: int, index: int) -> int:
    """Return a number from 0 to 2³² - 1 that is larger for a larger score."""
    bits: int = load_i32(scores, index)
    return bits + 0x80000000 if bits >= 0 else -1 - bits


@jit
def _threshold(scores: int, seen: int, most: int, counts: int) -> tuple[int, int]:
    """Return (the `most`-th largest score, as `_ordered`; how many scores equal to it are among the largest)."""
    found, left = 0, most
    for shift in (24, 16, 8, 0):
        for digit in range(_DIGITS):
            store_i64(counts, digit, 0)
        for j in range(seen):
            value = _ordered(scores, j)
            if value >> (shift + 8) == found:
                digit = value >> shift & (_DIGITS - 1)
                store_i64(counts, digit, load_i64(counts, digit) + 1)
        digit = _DIGITS - 1
        while load_i64(counts, digit) < left:
            left -= load_i64(counts, digit)
            digit -= 1
        found = found << 8 | digit
    return found, left


def _task(args: SelectArguments, task: int, scratch: int) -> None:
    s = 0
    while s + 1 < args.sequences and load_i32(args.query_start_S1, s + 1) <= task:
        s += 1
    end, context = load_i32(args.query_start_S1, s + 1), load_i32(args.context_len_S, s)
    seen = min(context - (end - task) + 1, context)
    table = args.block_table_SB + 4 * s * args.table_width
    most = args.most
    out = args.slot_TK + 4 * most * task
    store_i32(args.count_T, task, min(seen, most))
    if seen <= most:
        for j in range(seen):
            store_i32(out, j, _slot(args, table, j))
        return
    scores = scratch + _CHUNK_AT + 4 * CHUNK * args.heads
    _score(args, task, table, seen, scratch, scores)
    least, equal = _threshold(scores, seen, most, scratch + _COUNTS_AT)
    n = 0
    for j in range(seen):
        value = _ordered(scores, j)
        if value < least or (value == least and equal == 0):
            continue
        equal -= value == least
        store_i32(out, n, _slot(args, table, j))
        n += 1
