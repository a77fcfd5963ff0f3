"""Grouping of token–expert pairs in Triton, without a host synchronisation and in the same order every time.

T tokens, K experts per token, R = T · K pairs, E experts, N tiles at most, B blocks of pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moiety_kernels.gpu.cases import CompileCase
from moiety_kernels.route.groups import Groups, most_tiles

MAX_EXPERTS = 1024
_FEW_PAIRS = 8192  # up to here every expert's program reads all pairs; beyond, blocks are counted first
_CHUNK, _SMALL_CHUNK = 4096, 256  # pairs that this program reads at once; each size compiles at its first use
_BLOCK = 1024  # pairs per program where there are many
_CHANGING = ["num_pairs", "most_tiles", "num_blocks"]  # vary per step without recompilation
_COUNT_ROWS = 16  # rows of block counts read at once


def fits(expert_TK: Tensor, num_experts: int) -> bool:
    """Return whether `group` supports these pairs."""
    return expert_TK.dtype is torch.int32 and expert_TK.is_contiguous() and num_experts <= MAX_EXPERTS


def group(
    expert_TK: Tensor, num_experts: int, tile_rows: int, *, few_pairs: int = _FEW_PAIRS, block: int = _BLOCK
) -> Groups:
    """Return the pairs grouped by expert; pairs with a negative id have no expert and come last, in undefined order."""
    pairs = expert_TK.numel()
    groups = _empty_groups(expert_TK, num_experts, tile_rows)
    tensors = groups.order_R, groups.starts_E1, groups.tiles_N2, groups.num_tiles_1
    most, bins = groups.tiles_N2.shape[0], max(2, triton.next_power_of_2(num_experts))
    sizes = {"E": num_experts, "BINS": bins, "TILE_ROWS": tile_rows, "num_warps": 8}
    if pairs <= few_pairs:
        chunk = _SMALL_CHUNK if pairs <= _SMALL_CHUNK else _CHUNK
        _group_few[(num_experts,)](expert_TK, *tensors, pairs, most, CHUNK=chunk, **sizes)
        return groups
    blocks = triton.cdiv(pairs, block)
    counts_BE = torch.empty(blocks, bins, dtype=torch.int32, device=expert_TK.device)
    _count_blocks[(blocks,)](expert_TK, counts_BE, pairs, BINS=bins, BLOCK=block, num_warps=4)
    _group_blocks[(blocks + num_experts,)](
        expert_TK, counts_BE, *tensors, pairs, most, blocks, BLOCK=block, ROWS=_COUNT_ROWS, **sizes
    )
    return groups


def _empty_groups(expert_TK: Tensor, num_experts: int, tile_rows: int) -> Groups:
    pairs = expert_TK.numel()
    tiles = most_tiles(pairs, num_experts, tile_rows)
    return Groups(
        expert_TK.new_empty(pairs),
        expert_TK.new_empty(num_experts + 1),
        expert_TK.new_empty(tiles, 2),
        expert_TK.new_empty(1),
        tile_rows,
    )


@triton.jit(do_not_specialize=_CHANGING)
def _group_few(
    p_expert,
    p_order,
    p_starts,
    p_tiles,
    p_num_tiles,
    num_pairs,
    most_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Count all pairs and place those of expert e in order (program e), so that the result is deterministic."""
    expert = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for first in range(0, num_pairs, CHUNK):
        i_pair = first + tl.arange(0, CHUNK)
        expert_here = tl.load(p_expert + i_pair, mask=i_pair < num_pairs, other=-1)
        counts += tl.histogram(tl.maximum(expert_here, 0), BINS, mask=expert_here >= 0)
    _write_tiles(counts, expert, p_starts, p_tiles, p_num_tiles, num_pairs, most_tiles, E, BINS, TILE_ROWS)
    place = tl.sum(tl.where(tl.arange(0, BINS) < expert, counts, 0), axis=0)
    for first in range(0, num_pairs, CHUNK):
        i_pair = first + tl.arange(0, CHUNK)
        mine = (tl.load(p_expert + i_pair, mask=i_pair < num_pairs, other=-1) == expert).to(tl.int32)
        i_row = place + tl.cumsum(mine, axis=0) - 1
        tl.store(p_order + i_row, i_pair, mask=mine == 1)
        place += tl.sum(mine, axis=0)


@triton.jit(do_not_specialize=_CHANGING)
def _count_blocks(p_expert, p_counts, num_pairs, BINS: tl.constexpr, BLOCK: tl.constexpr):
    block = tl.program_id(0)
    i_pair = block * BLOCK + tl.arange(0, BLOCK)
    expert = tl.load(p_expert + i_pair, mask=i_pair < num_pairs, other=-1)
    counts = tl.histogram(tl.maximum(expert, 0), BINS, mask=expert >= 0)
    tl.store(p_counts + block.to(tl.int64) * BINS + tl.arange(0, BINS), counts)


@triton.jit(do_not_specialize=_CHANGING)
def _group_blocks(
    p_expert,
    p_counts,
    p_order,
    p_starts,
    p_tiles,
    p_num_tiles,
    num_pairs,
    most_tiles,
    num_blocks,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Place the pairs of block b, sorted by expert (program b); each later program writes one expert's tiles."""
    block = tl.program_id(0)
    i_bin = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    before = tl.zeros([BINS], tl.int32)
    for first in range(0, num_blocks, ROWS):
        i_row = first + tl.arange(0, ROWS)
        p_row = p_counts + i_row.to(tl.int64)[:, None] * BINS + i_bin[None, :]
        some = tl.load(p_row, mask=(i_row < num_blocks)[:, None], other=0)  # [ROWS, BINS]
        counts += tl.sum(some, axis=0)
        before += tl.sum(tl.where((i_row < block)[:, None], some, 0), axis=0)
    if block >= num_blocks:
        _write_tiles(
            counts, block - num_blocks, p_starts, p_tiles, p_num_tiles, num_pairs, most_tiles, E, BINS, TILE_ROWS
        )
    else:
        i_here = tl.arange(0, BLOCK)
        i_pair = block * BLOCK + i_here
        expert = tl.load(p_expert + i_pair, mask=i_pair < num_pairs, other=-1)
        expert = tl.where(expert < 0, BINS, expert)
        key = tl.sort(expert * BLOCK + i_here)  # distinct, so that the sort is stable
        expert = key // BLOCK
        here = tl.load(p_counts + block.to(tl.int64) * BINS + i_bin)
        shift = tl.cumsum(counts, axis=0) - counts + before - (tl.cumsum(here, axis=0) - here)
        i_row = i_here + tl.gather(shift, tl.minimum(expert, BINS - 1), axis=0)
        tl.store(p_order + i_row, block * BLOCK + key % BLOCK, mask=expert < BINS)


@triton.jit
def _write_tiles(
    counts,
    expert,
    p_starts,
    p_tiles,
    p_num_tiles,
    num_pairs,
    most_tiles,
    E: tl.constexpr,
    BINS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
):
    """Write one expert's tiles from the counts of all experts; expert 0's program also writes the shared fields."""
    i_bin = tl.arange(0, BINS)
    tiles = tl.cdiv(counts, TILE_ROWS)
    place = tl.sum(tl.where(i_bin < expert, tiles, 0), axis=0)
    row = tl.sum(tl.where(i_bin < expert, counts, 0), axis=0)
    count = tl.sum(tl.where(i_bin == expert, tiles, 0), axis=0)
    i_lane = tl.arange(0, 128)
    for first in range(0, count, 128):
        i_tile = first + i_lane
        p_tile = p_tiles + 2 * (place + i_tile)
        tl.store(p_tile, tl.full([128], 0, tl.int32) + expert, mask=i_tile < count)
        tl.store(p_tile + 1, row + i_tile * TILE_ROWS, mask=i_tile < count)
    if expert == 0:
        tl.store(p_starts + i_bin, tl.cumsum(counts, axis=0) - counts, mask=i_bin < E)
        tl.store(p_starts + E, tl.sum(counts, axis=0))
        _write_unused(p_tiles, p_num_tiles, tl.sum(tiles, axis=0), most_tiles)


@triton.jit
def _write_unused(p_tiles, p_num_tiles, num_tiles, most_tiles):
    """Write the number of tiles, and -1 in the unused ones."""
    tl.store(p_num_tiles, num_tiles)
    i_lane = tl.arange(0, 128)
    for first in range(2 * num_tiles, 2 * most_tiles, 128):
        tl.store(p_tiles + first + i_lane, -1, mask=first + i_lane < 2 * most_tiles)


def grouping_cases() -> list[CompileCase]:
    """Return the cases for few and many experts, few and many pairs."""
    pointers = dict.fromkeys(("p_expert", "p_order", "p_starts", "p_tiles", "p_num_tiles", "p_counts"), "*i32")
    numbers = dict.fromkeys(("num_pairs", "most_tiles", "num_blocks"), "i32")
    odd = frozenset(_CHANGING)
    cases = []
    for bins in (8, 512):
        constants = {"E": bins, "BINS": bins, "TILE_ROWS": 64}
        few, many = constants | {"CHUNK": _CHUNK}, constants | {"BLOCK": _BLOCK, "ROWS": _COUNT_ROWS}
        count = {"BINS": bins, "BLOCK": _BLOCK}
        types = pointers | numbers
        cases += [
            CompileCase(f"group few {bins}", _group_few, types, few, num_warps=8, unaligned=odd),
            CompileCase(f"count blocks {bins}", _count_blocks, types, count, num_warps=4, unaligned=odd),
            CompileCase(f"group blocks {bins}", _group_blocks, types, many, num_warps=8, unaligned=odd),
        ]
    return cases
