"""Products of rows with a weight, the core of linear maps and experts. M rows, N weight rows, K width.

A weight is bfloat16 or float32, row-major as checkpoints hold it. Few rows multiply it straight from memory, widened in
registers; for more, a panel of it is widened into cache first. Either way a row's result is the same bits.
"""

from __future__ import annotations

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.memory import store_i64
from moiety_kernels.cpu.vectors import TILE_COLS, TILE_ROWS, dot_tile, dot_tiles, widen_row

ROW_BLOCK = 96  # rows a task takes at once: with K = 1024 they fill a third of a 1 MiB L2 cache
WIDEN_ROWS = 2 * TILE_ROWS  # from so many rows on, widening first pays
PANEL_BYTES = 128 << 10  # of widened weight, to stay in the L2 cache
PANEL_PAD = 64  # bytes between widened rows, so that they do not all fall on the same cache sets
MAX_WIDTH = 65_536
CHUNK_BYTES = 128 << 10  # of weight that a task reads when there are few rows
MANY_ROWS_CHUNK_BYTES = 1 << 20  # and when rows are many: they, too, have to come from somewhere

# a thread's scratch
ROWS_AT = 0  # addresses of the rows
WIDE_AT = 8 << 10  # a panel of widened weight rows, at least TILE_COLS of them
TEMP_AT = WIDE_AT + TILE_COLS * (4 * MAX_WIDTH + PANEL_PAD)

_wide_tile, _narrow_tile = dot_tiles(TILE_COLS, widen=False), dot_tiles(TILE_COLS, widen=True)
_wide_single = dot_tile(1, 1, widen=False)
_narrow_single = dot_tile(1, 1, widen=True)


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
def multiply(rows: int, m: int, w: int, narrow: int, n: int, k: int, out: int, out_stride: int, scratch: int) -> None:
    """out[:m, :n] = rows · wᵀ; `rows` is the address of m row addresses, `narrow` says that w is bfloat16."""
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


def chunk_rows(row_bytes: int, num_rows: int, rows_at_once: int) -> int:
    """How many of a weight's `num_rows` rows a task takes that multiplies `rows_at_once` rows: a multiple of 16."""
    most = MANY_ROWS_CHUNK_BYTES if rows_at_once >= WIDEN_ROWS else CHUNK_BYTES
    return min(max(16, most // row_bytes // 16 * 16), -(-num_rows // 16) * 16)
