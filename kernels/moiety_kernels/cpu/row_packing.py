"""Packing of rows for `dots.py`: as bfloat16, or as 16-bit integers in groups that share a scale. K width of a row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from moiety_kernels.cpu.dots import (
    BLOCKS,
    BYTES_AVAILABLE,
    PAIRS_AVAILABLE,
    PLAIN_PAIRS_AVAILABLE,
    WHOLE_AVAILABLE,
    narrowed,
)
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.values import I8, LANES, VF, VI16, VI32, Float, Floats, Int, Int16s, Pairs, Vector

_GREATEST = 32_767.0  # largest integer of a row: a group's products with eight bits stay far below 2³¹
_MIN_GROUP_VALUE = 1e-30  # a group whose values are all smaller counts as zeros


def _pack_pairs(e: Emitter, row_K: Floats, k: Int, out_K: Pairs) -> None:
    """Emit out[i] = bfloat16(row[i])."""
    for i in e.loop(k, 2 * LANES):
        out_K[i] = narrowed(e, row_K[i], row_K[i + LANES])


def _pack_fours(e: Emitter, row_K: Floats, k: Int, out_K: Pairs) -> None:
    """Emit out = bfloat16(row) in the order in which `dots.py` reads the inputs of a 4-bit weight.

    A byte of that weight holds two inputs that are 16 apart, and two blocks are read at once.
    """

    def write(i: Int, quarters: Sequence[int], to: int) -> None:
        low, high = (row_K[i + LANES * quarter] for quarter in quarters)
        out_K[i + to] = narrowed(e, low, high)

    whole = k & -BLOCKS
    for i in e.loop_if_any(whole, BLOCKS):
        write(i, (0, 2), 0)
        write(i, (1, 3), 2 * LANES)
    for i in e.loop_if_any(k - whole, 2 * LANES):
        write(i + whole, (0, 1), 0)


def _sum_block(e: Emitter, row: Floats) -> Float:
    """Emit Σ bfloat16(row[i]) over 2 · LANES inputs, which are a block of a weight."""
    pairs = narrowed(e, row[e.int64(0)], row[e.int64(LANES)])
    return e.sum((pairs << 16).as_(VF) + (pairs & 0xFFFF_0000).as_(VF))


def _pack_whole(e: Emitter, row: Floats, count: Int, out: Int16s, scale_at: Floats, *, is_split: bool) -> None:
    """Emit the integers of a row's group and their scale: row[i] ≈ out[i] · scale.

    A NaN or infinite input makes the scale NaN or infinite. With `is_split`, of each 2 · LANES integers the upper bytes
    come first, then the lower ones.
    """

    def larger(a: Vector, b: Vector) -> Vector:
        return (a > b).choose(a, b)  # of a float's bits: NaN is the largest

    magnitudes = [e.constant(0, VI32)]
    for i in e.loop(count, LANES, magnitudes):
        magnitudes[0] = larger(row[i].as_(VI32) & 0x7FFF_FFFF, magnitudes[0])
    top = e.reduce(magnitudes[0], larger).as_(VF)
    zero = e.constant(0.0)
    is_some = top.unordered(">=", _MIN_GROUP_VALUE)
    scale = is_some.choose(top * (1.0 / _GREATEST), zero)
    is_number = is_some & (top < math.inf)
    inverse = is_number.choose(_GREATEST / top, zero)
    scale_at[0] = scale.lane(0)
    if not is_split:
        for i in e.loop(count, LANES):
            out[i] = e.rounded(row[i] * inverse).to_int32s().truncated(VI16)
        return
    for i in e.loop(count, 2 * LANES):
        halves = [e.rounded(row[i + part] * inverse).to_int32s().truncated(VI16) for part in (0, LANES)]
        words = halves[0].shuffled(halves[1], range(2 * LANES))
        bytes_ = words.as_(ir.VectorType(I8, 4 * LANES))
        out[i] = bytes_.lanes([*range(1, 4 * LANES, 2), *range(0, 4 * LANES, 2)])


pack_pairs_row = function("moiety_pack_pairs", _pack_pairs, is_there=PLAIN_PAIRS_AVAILABLE)
pack_fours_row = function("moiety_pack_fours", _pack_fours, is_there=PAIRS_AVAILABLE)
sum_block = function("moiety_sum_block", _sum_block, is_there=PAIRS_AVAILABLE)
pack_whole_group = function("moiety_pack_whole", partial(_pack_whole, is_split=False), is_there=WHOLE_AVAILABLE)
pack_eights_group = function(
    "moiety_pack_eights", partial(_pack_whole, is_split=BYTES_AVAILABLE), is_there=WHOLE_AVAILABLE
)
