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
    pack_all,
    pack_eight,
    pack_four,
    pack_one,
    release,
    sums_1_1,
    sums_1_2,
    sums_2_1,
    sums_2_2,
    sums_2_2_ahead,
    unpack,
)
from moiety_kernels.cpu.vectors import TILE_COLS, TILE_ROWS, dot_tile, dot_tiles, widen_row

if TYPE_CHECKING:
    from torch import Tensor

ROW_BLOCK = 96  # rows a task takes at once: with K = 1024 they fill a third of a 1 MiB L2 cache
TILES_BLOCK_BYTES = 512 << 10  # of packed rows that a task takes at once, to stay in the L2 cache
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
ROWS_AT = 0  # addresses of the rows, up to 1,024
PADDED_AT = 8 << 10  # those of one panel's rows
CONFIG_AT = 9 << 10  # the tiles' configuration
SUMS_AT = 12 << 10  # four tiles of sums
WIDE_AT = 16 << 10  # a panel of widened weight rows, at least TILE_COLS of them, or rows packed for tiles
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
        elif count <= 8:
            pack_eight(start, k, panel)
        else:
            pack_all(start, k, panel)


@jit
def _unpack_few(sums: int, height: int, m: int, out: int, out_stride: int) -> None:
    """Write a tile of sums that has less than 16 weight rows as so many columns of m rows."""
    for i in range(m):
        for j in range(height):
            store_f32(out + i * out_stride, j, load_f32(sums + 4 * ROWS * j, i))


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
        sums_2_1(w, w_stride, panel, apart, k, sums)
    elif ahead:
        sums_2_2_ahead(w, w_stride, panel, apart, k, sums)
    else:
        sums_2_2(w, w_stride, panel, apart, k, sums)


@jit
def _multiply_packed(packed: int, m: int, w: int, n: int, k: int, out: int, out_stride: int, scratch: int) -> None:
    """out[:m, :n] for bfloat16 w on the matrix tiles, with the rows in panels."""
    sums, w_stride, apart = scratch + SUMS_AT, 2 * k, 2 * ROWS * k
    configure(ROWS, scratch + CONFIG_AT)
    column = 0
    while column < n:
        num_tiles, height = (2 if n - column >= 2 * ROWS else 1), min(ROWS, n - column)
        if height < ROWS:
            configure(height, scratch + CONFIG_AT)
        for i in range(0, m, 2 * ROWS):
            num_panels = 2 if m - i > ROWS else 1
            ahead = i == 2 * ROWS and n - column >= 4 * ROWS
            _tile_sums(
                num_tiles, num_panels, ahead, w + column * w_stride, w_stride, packed + i * w_stride, apart, k, sums
            )
            for tile in range(num_tiles):
                for p in range(num_panels):
                    row = i + p * ROWS
                    target = out + row * out_stride + 4 * (column + tile * ROWS)
                    part = sums + SUMS_BYTES * (tile * num_panels + p)
                    if height == ROWS:
                        unpack(part, min(ROWS, m - row), target, out_stride)
                    else:
                        _unpack_few(part, height, min(ROWS, m - row), target, out_stride)
        column += num_tiles * ROWS
    release()


@jit
def _multiply_tiles(
    rows: int, m: int, w: int, other_w: int, n: int, k: int, out: int, other_out: int, out_stride: int, scratch: int
) -> None:
    """The same for rows anywhere, and for one or two weights; no second one is 0."""
    packed, at_once = scratch + WIDE_AT, PACKED_BYTES // (2 * ROWS * k) * ROWS
    for first in range(0, m, at_once):
        count, below = min(at_once, m - first), first * out_stride
        _pack_rows(rows + 8 * first, count, k, packed, scratch)
        _multiply_packed(packed, count, w, n, k, out + below, out_stride, scratch)
        if other_w:
            _multiply_packed(packed, count, other_w, n, k, other_out + below, out_stride, scratch)


@jit
def multiply(rows: int, m: int, w: int, kind: int, n: int, k: int, out: int, out_stride: int, scratch: int) -> None:
    """out[:m, :n] = rows · wᵀ; `rows` is the address of m row addresses, `kind` that of the product."""
    if kind == BFLOAT16_TILES:
        _multiply_tiles(rows, m, w, 0, n, k, out, 0, out_stride, scratch)
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
def multiply_both(
    rows: int,
    m: int,
    w: int,
    other_w: int,
    kind: int,
    n: int,
    k: int,
    out: int,
    other_out: int,
    stride: int,
    scratch: int,
) -> None:
    """`multiply` with two weights of one kind and size, into two outputs of one stride."""
    if kind == BFLOAT16_TILES:
        _multiply_tiles(rows, m, w, other_w, n, k, out, other_out, stride, scratch)
        return
    multiply(rows, m, w, kind, n, k, out, stride, scratch)
    multiply(rows, m, other_w, kind, n, k, other_out, stride, scratch)


@jit
def point_rows(rows: int, first: int, stride: int, m: int) -> None:
    """Write the addresses of m evenly spaced rows."""
    for i in range(m):
        store_i64(rows, i, first + i * stride)


def row_block(kind: int, width: int) -> int:
    """How many rows a task takes at once."""
    if kind != BFLOAT16_TILES:
        return ROW_BLOCK
    return min(1024, max(ROW_BLOCK, TILES_BLOCK_BYTES // (2 * width) // ROWS * ROWS))


def chunk_rows(kind: int, row_bytes: int, num_rows: int, rows_at_once: int) -> int:
    """How many of a weight's `num_rows` rows a task takes that multiplies `rows_at_once` rows: a multiple of 16."""
    if rows_at_once >= WIDEN_ROWS:
        most = MANY_ROWS_CHUNK_BYTES
    else:
        most = TILES_CHUNK_BYTES if kind == BFLOAT16_TILES else CHUNK_BYTES
    return min(max(16, most // row_bytes // 16 * 16), -(-num_rows // 16) * 16)
