"""Products of rows with a weight, the core of linear maps and experts. M rows, N weight rows, K width.

A weight is bfloat16 or float32, row-major as checkpoints hold it. A bfloat16 weight is multiplied on the processor's
matrix tiles where there are any (`tiles.py`). Elsewhere, few rows multiply it straight from memory, widened in
registers; for more, a panel of it is widened into cache first. Whichever way it is, a row's result is the same bits
however many rows are beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu import tiles
from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import load_f32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.tiles import (
    ROWS,
    SUMS_BYTES,
    configure,
    copy,
    pack_all,
    pack_four,
    pack_one,
    release,
    sums_1_1,
    sums_1_2,
    sums_2_1,
    sums_2_1_ahead,
    sums_2_2,
    sums_2_2_ahead,
    turn,
)
from moiety_kernels.cpu.vectors import TILE_COLS, TILE_ROWS, dot_tile, dot_tiles, widen_row

if TYPE_CHECKING:
    from torch import Tensor

ROW_BLOCK = 96  # rows a task takes at once: with K = 1024 they fill a third of a 1 MiB L2 cache
WIDEN_ROWS = 2 * TILE_ROWS  # from so many rows on, widening first pays
PANEL_BYTES = 128 << 10  # of widened weight, to stay in the L2 cache
PANEL_PAD = 64  # bytes between widened rows, so that they do not all fall on the same cache sets
MAX_WIDTH = 65_536
CHUNK_BYTES = 128 << 10  # of weight that a task reads when there are few rows
TILES_CHUNK_BYTES = 512 << 10  # likewise on tiles, for which each task packs the rows anew
MANY_ROWS_CHUNK_BYTES = 1 << 20  # and when rows are many: they, too, have to come from somewhere

# how a weight is multiplied
FLOAT32, BFLOAT16, BFLOAT16_TILES = 0, 1, 2

# a thread's scratch
ROWS_AT = 0  # addresses of the rows
PADDED_AT = 1 << 10  # the addresses of one panel's rows
CONFIG_AT = 2 << 10  # the tiles' configuration
SUMS_AT = 4 << 10  # four tiles of sums
WIDE_AT = 8 << 10  # a panel of widened weight rows, at least TILE_COLS of them, or rows packed for tiles
TEMP_AT = WIDE_AT + TILE_COLS * (4 * MAX_WIDTH + PANEL_PAD)
PACKED_BYTES = TEMP_AT - WIDE_AT

_wide_tile, _narrow_tile = dot_tiles(TILE_COLS, widen=False), dot_tiles(TILE_COLS, widen=True)
_wide_single = dot_tile(1, 1, widen=False)
_narrow_single = dot_tile(1, 1, widen=True)


def product_kind(weight: Tensor) -> int:
    """How a weight of K columns, its last dimension, is multiplied on this machine."""
    width = weight.shape[-1]
    if weight.dtype is torch.float32:
        return FLOAT32
    fits = width % tiles.DEPTH == 0 and 2 * ROWS * width <= PACKED_BYTES
    return BFLOAT16_TILES if fits and tiles.usable() else BFLOAT16


@jit
def _next_rows(left: int) -> int:
    """How many of the rows that are left the next tile takes, so that all tiles are of about one size."""
    tiles = (left + TILE_ROWS - 1) // TILE_ROWS
    return (left + tiles - 1) // tiles


@jit
def multiply_wide(rows: int, m: int, w: int, w_stride: int, n: int, k: int, out: int, out_stride: int) -> None:
    """out[:m, :n] for float32 w, which should fit in the cache; `rows` is the address of m row addresses."""
    i = 0
    while i < m:
        step = _next_rows(m - i)
        start, target, j = rows + 8 * i, out + i * out_stride, 0
        while j + TILE_COLS <= n:
            _wide_tile(step, start, w + j * w_stride, w_stride, k, target + 4 * j, out_stride)
            j += TILE_COLS
        while j < n:
            for r in range(step):
                _wide_single(start + 8 * r, w + j * w_stride, w_stride, k, target + r * out_stride + 4 * j, out_stride)
            j += 1
        i += step


@jit
def _multiply_narrow(rows: int, m: int, w: int, n: int, k: int, out: int, out_stride: int) -> None:
    """out[:m, :n] for bfloat16 w, each weight row read once."""
    w_stride, j = 2 * k, 0
    while j < n:
        cols = TILE_COLS if n - j >= TILE_COLS else 1
        tile, i = w + j * w_stride, 0
        while i < m:
            start, target = rows + 8 * i, out + i * out_stride + 4 * j
            if cols == 1:
                _narrow_single(start, tile, w_stride, k, target, out_stride)
                i += 1
            else:
                step = _next_rows(m - i)
                _narrow_tile(step, start, tile, w_stride, k, target, out_stride)
                i += step
        j += cols


@jit
def _pack_rows(rows: int, m: int, k: int, packed: int, scratch: int) -> None:
    """Write m rows as panels of 16. What a panel holds beyond them is never looked at."""
    for first in range(0, m, ROWS):
        start, panel, count = rows + 8 * first, packed + 2 * k * first, min(ROWS, m - first)
        if count == 1:
            pack_one(start, k, panel)
            continue
        if count < ROWS:
            padded = scratch + PADDED_AT
            for i in range(ROWS):
                store_i64(padded, i, load_i64(start, min(i, count - 1)))
            start = padded
        if count <= 4:
            pack_four(start, k, panel)
        else:
            pack_all(start, k, panel)


@jit
def _unpack_sums(sums: int, height: int, m: int, out: int, out_stride: int) -> None:
    """Write a tile of sums, a row a weight row, as `height` columns of m rows."""
    turn(sums)
    for i in range(m):
        if height == ROWS:
            copy(sums + 4 * ROWS * i, out + i * out_stride)
        else:
            for j in range(height):
                store_f32(out + i * out_stride, j, load_f32(sums + 4 * ROWS * i, j))


@jit
def _tile_sums(
    num_tiles: int, num_panels: int, ahead: bool, w: int, w_stride: int, panel: int, apart: int, k: int, sums: int
) -> None:
    if num_tiles == 1:
        if num_panels == 1:
            sums_1_1(w, w_stride, panel, apart, k, sums)
        else:
            sums_1_2(w, w_stride, panel, apart, k, sums)
    elif num_panels == 1:
        if ahead:
            sums_2_1_ahead(w, w_stride, panel, apart, k, sums)
        else:
            sums_2_1(w, w_stride, panel, apart, k, sums)
    elif ahead:
        sums_2_2_ahead(w, w_stride, panel, apart, k, sums)
    else:
        sums_2_2(w, w_stride, panel, apart, k, sums)


@jit
def _multiply_tiles(rows: int, m: int, w: int, n: int, k: int, out: int, out_stride: int, scratch: int) -> None:
    """out[:m, :n] for bfloat16 w on the matrix tiles."""
    sums, packed, w_stride, apart = scratch + SUMS_AT, scratch + WIDE_AT, 2 * k, 2 * ROWS * k
    at_once = PACKED_BYTES // apart * ROWS
    for first in range(0, m, at_once):
        count = min(at_once, m - first)
        _pack_rows(rows + 8 * first, count, k, packed, scratch)
        configure(ROWS, scratch + CONFIG_AT)
        column = 0
        while column < n:
            num_tiles, height = (2 if n - column >= 2 * ROWS else 1), min(ROWS, n - column)
            if height < ROWS:
                configure(height, scratch + CONFIG_AT)
            start = w + column * w_stride
            for i in range(0, count, 2 * ROWS):
                panel, num_panels = packed + i * w_stride, (2 if count - i > ROWS else 1)
                _tile_sums(num_tiles, num_panels, i == 0, start, w_stride, panel, apart, k, sums)
                for tile in range(num_tiles):
                    for p in range(num_panels):
                        row = i + p * ROWS
                        target = out + (first + row) * out_stride + 4 * (column + tile * ROWS)
                        part = sums + SUMS_BYTES * (tile * num_panels + p)
                        _unpack_sums(part, height, min(ROWS, count - row), target, out_stride)
            column += num_tiles * ROWS
    release()


@jit
def multiply(rows: int, m: int, w: int, kind: int, n: int, k: int, out: int, out_stride: int, scratch: int) -> None:
    """out[:m, :n] = rows · wᵀ; `rows` is the address of m row addresses, `kind` that of the product."""
    if kind == BFLOAT16_TILES:
        _multiply_tiles(rows, m, w, n, k, out, out_stride, scratch)
        return
    narrow = kind == BFLOAT16
    if narrow and m < WIDEN_ROWS:
        _multiply_narrow(rows, m, w, n, k, out, out_stride)
        return
    wide, wide_stride = scratch + WIDE_AT, 4 * k + PANEL_PAD
    panel = max(TILE_COLS, PANEL_BYTES // wide_stride // TILE_COLS * TILE_COLS)
    for j in range(0, n, panel):
        count = min(panel, n - j)
        if narrow:
            for r in range(count):
                widen_row(w + 2 * (j + r) * k, k, wide + r * wide_stride)
            multiply_wide(rows, m, wide, wide_stride, count, k, out + 4 * j, out_stride)
        else:
            multiply_wide(rows, m, w + 4 * j * k, 4 * k, count, k, out + 4 * j, out_stride)


@jit
def point_rows(rows: int, first: int, stride: int, m: int) -> None:
    """Write the addresses of m evenly spaced rows."""
    for i in range(m):
        store_i64(rows, i, first + i * stride)


def chunk_rows(kind: int, row_bytes: int, num_rows: int, rows_at_once: int) -> int:
    """How many of a weight's `num_rows` rows a task takes that multiplies `rows_at_once` rows: a multiple of 16."""
    if rows_at_once >= WIDEN_ROWS:
        most = MANY_ROWS_CHUNK_BYTES
    else:
        most = TILES_CHUNK_BYTES if kind == BFLOAT16_TILES else CHUNK_BYTES
    return min(max(16, most // row_bytes // 16 * 16), -(-num_rows // 16) * 16)
