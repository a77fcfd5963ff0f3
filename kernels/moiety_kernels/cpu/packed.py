"""Products of rows, packed first, with a weight where there are no matrix tiles. M rows, N weight rows, K width. What
is packed, and why, stands in `dots.py`."""

from __future__ import annotations

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.dots import (
    COLS,
    GROUP,
    NARROW_FEW,
    NARROW_ROWS,
    PAIRS_FEW,
    PAIRS_ROWS,
    SHARE_BITS,
    eights_few,
    eights_many,
    fours_few,
    fours_many,
    grouped_eights_few,
    grouped_eights_many,
    pack_fours_row,
    pack_pairs_row,
    pack_whole_group,
    pairs_few,
    pairs_many,
)
from moiety_kernels.cpu.memory import load_i64, store_i64
from moiety_kernels.cpu.unpacking import E2M1, INT8, PLAIN, WHOLE_ROW

PACKED_BYTES = 512 << 10  # of rows at once, to stay in the L2 cache
PAD = 64  # bytes between packed rows, so that they do not all fall on the same cache sets
TILES_AHEAD = 2  # of COLS weight rows: how far ahead memory is asked for them

# a weight as it lies: int64 values
VALUES, SCALES, NUMBERS, SHIFT, ROW_BYTES, SCALES_BYTES = range(6)
DESCRIPTION_BYTES = 64


@jit
def describe(at: int, values: int, scales: int, numbers: int, shift: int, first: int, k: int) -> int:
    """Write down rows of k inputs of a weight, from row `first` on; returns `at`."""
    row_bytes = 2 * k if numbers == PLAIN else k if numbers == INT8 else k // 2
    scales_bytes = 0 if numbers == PLAIN else 4 * (((k - 1) >> shift) + 1)
    store_i64(at, VALUES, values + first * row_bytes)
    store_i64(at, SCALES, scales + first * scales_bytes)
    store_i64(at, NUMBERS, numbers)
    store_i64(at, SHIFT, shift)
    store_i64(at, ROW_BYTES, row_bytes)
    store_i64(at, SCALES_BYTES, scales_bytes)
    return at


@jit
def packed_stride(k: int) -> int:
    """Bytes from one packed row to the next."""
    scales_bytes = 4 * ((k + GROUP - 1) // GROUP)
    return (2 * k + scales_bytes + 63) // 64 * 64 + PAD


@jit
def pack(rows: int, m: int, k: int, numbers: int, packed: int) -> None:
    """Write m rows, whose addresses are at `rows`, for a weight whose numbers are kept so."""
    for i in range(m):
        row, target = load_i64(rows, i), packed + i * packed_stride(k)
        if numbers == PLAIN:
            pack_pairs_row(row, k, target)
        elif numbers == INT8:
            for first in range(0, k, GROUP):
                scale = target + 2 * k + 4 * (first // GROUP)
                pack_whole_group(row + 4 * first, min(GROUP, k - first), target + 2 * first, scale)
        else:
            pack_fours_row(row, k, target)


@jit
def multiply_packed(packed: int, m: int, weight: int, n: int, k: int, out: int, out_stride: int) -> None:
    """out[:m, :n] of packed rows with the weight that is described at `weight`."""
    is_plain, stride = load_i64(weight, NUMBERS) == PLAIN, packed_stride(k)
    few, most = (PAIRS_FEW, PAIRS_ROWS) if is_plain else (NARROW_FEW, NARROW_ROWS)
    tiles, parts = 0 if m <= few else n // COLS, (m + most - 1) // most
    tile_bytes, share = COLS * load_i64(weight, ROW_BYTES), (COLS << SHARE_BITS) // parts
    for tile in range(tiles):
        first, i, part = COLS * tile, 0, 0
        following = load_i64(weight, VALUES) + (tile + TILES_AHEAD) * tile_bytes
        while i < m:
            step = _even_part(m - i, most)
            ahead, target = following + tile_bytes * part // parts, out + i * out_stride + 4 * first
            _dots(step, packed + i * stride, stride, k, weight, first, True, ahead, share, target, out_stride)
            i += step
            part += 1
    first, i = COLS * tiles, 0
    while i < m and first < n:
        step = _even_part(m - i, few)
        target = out + i * out_stride + 4 * first
        _dots(step, packed + i * stride, stride, k, weight, first, False, n - first, 0, target, out_stride)
        i += step


@jit
def _even_part(left: int, most: int) -> int:
    """How many of the rows that are left are next, so that all parts are of about one size."""
    parts = (left + most - 1) // most
    return (left + parts - 1) // parts


@jit
def _dots(
    m: int, rows: int, stride: int, k: int, weight: int, first: int, many: bool, ahead: int, share: int, out: int,
    out_stride: int,
) -> None:  # fmt: skip
    """Of m packed rows and weight rows from `first` on: COLS of them, or `ahead`."""
    numbers, shift = load_i64(weight, NUMBERS), load_i64(weight, SHIFT)
    w_bytes, s_bytes = load_i64(weight, ROW_BYTES), load_i64(weight, SCALES_BYTES)
    w, s, x_s = load_i64(weight, VALUES) + first * w_bytes, load_i64(weight, SCALES) + first * s_bytes, 2 * k
    table, to = int(numbers == E2M1), out_stride
    if numbers == PLAIN:
        if many:
            pairs_many(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
        else:
            pairs_few(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
    elif numbers != INT8:
        if many:
            fours_many(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
        else:
            fours_few(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
    elif shift == WHOLE_ROW:
        if many:
            eights_many(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
        else:
            eights_few(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
    elif many:
        grouped_eights_many(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
    else:
        grouped_eights_few(m, rows, stride, k, x_s, w, w_bytes, ahead, share, s, s_bytes, shift, table, out, to)
