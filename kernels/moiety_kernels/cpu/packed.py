"""Products of packed rows with a weight, for CPUs without matrix tiles. M rows, N weight rows, K width.

`dots.py` describes the packing and the reasons for it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from moiety_kernels.cpu.compiling import inlined_jit, jit
from moiety_kernels.cpu.dots import (
    COLS,
    EIGHTS_FEW,
    EIGHTS_ROWS,
    FOURS_FEW,
    GROUP,
    PAIRS_FEW,
    PAIRS_ROWS,
    SHARE_BITS,
)
from moiety_kernels.cpu.memory import load_i64, store_f32
from moiety_kernels.cpu.pair_fours import unpack_fours_row, unpack_half_fours_row, unpack_offset_fours_row
from moiety_kernels.cpu.row_packing import pack_eights_group, pack_fours_row, pack_pairs_row, sum_block
from moiety_kernels.cpu.structs import Address, Int64, store_struct, struct_at
from moiety_kernels.cpu.unpacking import E2M1, E2M1_HALVES, INT4_OFFSETS, INT8, PLAIN
from moiety_kernels.cpu.vectors import fetch
from moiety_kernels.quantization.weight import BLOCK

PACKED_BYTES = 512 << 10  # of the packed rows that are multiplied at once
PAD = 64  # bytes between packed rows, so that they do not all map to the same cache sets
TILES_AHEAD, FOURS_AHEAD = 2, 8  # prefetch distance in groups of COLS weight rows; the second is for unpacking
FOURS_AHEAD_BYTES = 4 << 10  # prefetch distance into the L1 cache, of 4-bit rows that are multiplied as they lie


class WeightDescription(NamedTuple):
    """Rows of a weight that is multiplied in place."""

    values: Address  # of the first row
    scales: Address
    numbers: Int64  # the number format
    shift: Int64  # from an input to its scale
    row_bytes: Int64
    scales_bytes: Int64  # of a row's scales


DESCRIPTION_BYTES = 64


@jit
def describe(at: int, values: int, scales: int, numbers: int, shift: int, first: int, k: int) -> int:
    """Write the description of a weight's rows of k inputs from row `first` on; return `at`."""
    row_bytes = 2 * k if numbers == PLAIN else k if numbers == INT8 else k // 2
    scales_bytes = 0 if numbers == PLAIN else 4 * (((k - 1) >> shift) + 1) << int(numbers == INT4_OFFSETS)
    description = WeightDescription(
        values=values + first * row_bytes,
        scales=scales + first * scales_bytes,
        numbers=numbers,
        shift=shift,
        row_bytes=row_bytes,
        scales_bytes=scales_bytes,
    )
    store_struct(at, description)
    return at


@jit
def packed_stride(k: int, numbers: int) -> int:
    """Return the bytes from one packed row to the next."""
    num_floats = 2 * k // BLOCK if numbers == INT4_OFFSETS else (k + GROUP - 1) // GROUP
    return (2 * k + 4 * num_floats + 63) // 64 * 64 + PAD


@jit
def pack(rows: int, m: int, k: int, numbers: int, shift: int, packed: int) -> None:
    """Pack m rows, whose addresses are at `rows`, for a weight with that number format and shift."""
    for i in range(m):
        row, target = load_i64(rows, i), packed + i * packed_stride(k, numbers)
        if numbers == PLAIN:
            pack_pairs_row(row, k, target)
        elif numbers == INT8:
            for first in range(0, k, GROUP):
                scale = target + 2 * k + 4 * (first // GROUP)
                pack_eights_group(row + 4 * first, min(GROUP, k - first), target + 2 * first, scale)
        else:
            pack_fours_row(row, k, target)
            if numbers == INT4_OFFSETS:
                _pack_sums(row, k, 1 << shift, target + 2 * k)


@jit
def _pack_sums(row: int, k: int, group: int, sums: int) -> None:
    """Write the sum of the row, rounded to bfloat16, in each group, after a 0 for the group's scale."""
    for g in range(k // group):
        total = 0.0
        for first in range(g * group, (g + 1) * group, BLOCK):
            total += sum_block(row + 4 * first)
        store_f32(sums, 2 * g, 0.0)
        store_f32(sums, 2 * g + 1, total)


@jit
def even_part(left: int, most: int) -> int:
    """Return how many of the remaining rows are next, so that all parts have about the same size."""
    parts = (left + most - 1) // most
    return (left + parts - 1) // parts


@inlined_jit
def multiply_packed(
    of_weight: Any, of_unpacked: Any,
    rows: int, m: int, weight: int, other: int, n: int, k: int, out: int, other_out: int, out_stride: int, area: int,
) -> None:  # fmt: skip
    """Compute out[:m, :n] of the m rows whose addresses are at `rows` with the weight described at `weight`.

    `of_weight` and `of_unpacked`: functions of `dots` for the weight as it lies and, for one in four bits, for unpacked
    rows of it; the code is compiled once for each pair of them. `other`: a second weight of the same kind, or 0.
    `area`: PACKED_BYTES for packed rows, and COLS unpacked ones.
    """
    described = struct_at(WeightDescription, weight)
    numbers, shift, stride = described.numbers, described.shift, packed_stride(k, described.numbers)
    w_bytes, s_bytes = described.row_bytes, described.scales_bytes
    halves = int(numbers == E2M1_HALVES)
    table = int(numbers == E2M1) + halves + 2 * int(numbers == INT4_OFFSETS)
    few, most, is_fours = PAIRS_FEW, PAIRS_ROWS, False
    if numbers == INT8:
        few, most = EIGHTS_FEW, EIGHTS_ROWS
    elif numbers != PLAIN:
        few, is_fours = FOURS_FEW, True
    at_once = max(1, PACKED_BYTES // stride)
    for start in range(0, m, at_once):
        count = min(at_once, m - start)
        pack(rows + 8 * start, count, k, numbers, shift, area)
        unpacks, alone = is_fours and count > few, not is_fours and count <= few
        columns = n // COLS * COLS if is_fours and not unpacks else COLS  # weight rows of a tile
        tiles, parts = 0 if alone or n < COLS else n // columns, (count + most - 1) // most
        share = (COLS << SHARE_BITS) // parts
        distance = FOURS_AHEAD_BYTES if is_fours else COLS * w_bytes * TILES_AHEAD
        for turn in range((2 if other else 1) * (tiles + 1)):
            tile, of = turn % (tiles + 1), struct_at(WeightDescription, other if turn > tiles else weight)
            many, first, i, part = tile < tiles, columns * tile, 0, 0
            num_columns = columns if many else n - first
            w, s = of.values + first * w_bytes, of.scales + first * s_bytes
            column = (other_out if turn > tiles else out) + start * out_stride + 4 * first
            if first == n:
                continue
            if many and unpacks:
                panel = area + PACKED_BYTES
                _unpack(w, w_bytes, s, s_bytes, k, shift, table, halves, panel)
                while i < count:
                    step = even_part(count - i, most)
                    of_unpacked(
                        is_many=1, num_rows=step,
                        packed_MK=area + i * stride, packed_stride=stride, k=k, x_scales_at=2 * k,
                        w_NK=panel, w_stride=2 * k + PAD, n=COLS, ahead=panel, share=0,
                        scales_NG=s, scales_stride=s_bytes, shift=shift, table=0,
                        out_MN=column + i * out_stride, out_stride=out_stride,
                    )  # fmt: skip
                    i += step
            while i < count:
                step = even_part(count - i, most if many and not is_fours else few)
                ahead = w + distance + COLS * w_bytes * part // parts
                of_weight(
                    is_many=int(many), num_rows=step,
                    packed_MK=area + i * stride, packed_stride=stride, k=k, x_scales_at=2 * k,
                    w_NK=w, w_stride=w_bytes, n=num_columns, ahead=ahead, share=share,
                    scales_NG=s, scales_stride=s_bytes, shift=shift, table=table,
                    out_MN=column + i * out_stride, out_stride=out_stride,
                )  # fmt: skip
                i += step
                part += 1


@jit
def _unpack(
    values: int,
    row_bytes: int,
    scales: int,
    scales_bytes: int,
    k: int,
    shift: int,
    table: int,
    halves: int,
    panel: int,
) -> None:
    """Unpack COLS 4-bit weight rows to bfloat16 and prefetch the next ones."""
    fetch(values + COLS * row_bytes * FOURS_AHEAD, COLS * row_bytes)
    for row in range(COLS):
        w, s, target = values + row * row_bytes, scales + row * scales_bytes, panel + row * (2 * k + PAD)
        if halves:
            unpack_half_fours_row(w, s, k, shift, table, target)
        elif table == 2:
            unpack_offset_fours_row(w, s, k, shift, table, target)
        else:
            unpack_fours_row(w, s, k, shift, table, target)
