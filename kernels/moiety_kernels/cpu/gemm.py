"""Products of rows with a weight, the core of linear layers and experts. M rows, N weight rows, K width.

A weight is bfloat16 or float32, row-major as in checkpoints, or quantized. A bfloat16 weight is multiplied on the CPU's
matrix tiles if there are any (`tiles.py`), else in pairs where the CPU supports that (`packed.py`). Elsewhere, few rows
are multiplied with it straight from memory, widened in registers; for more rows, a panel of it is widened into cache
first. A quantized weight is multiplied in place where there are no tiles (`packed.py`), or unpacked to bfloat16. On
every path, a row's result has the same bits however many rows are beside it.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch

from moiety_kernels.cpu import paths, tiles
from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.dots import BYTES_AVAILABLE
from moiety_kernels.cpu.instructions import EMULATED
from moiety_kernels.cpu.memory import load_f32, load_i64, store_f32, store_i64
from moiety_kernels.cpu.packed import DESCRIPTION_BYTES, describe
from moiety_kernels.cpu.team import SCRATCH_BYTES
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
    sums_2_2_fetching,
    sums_2_2_fetching_rest,
    unpack,
)
from moiety_kernels.cpu.unpacking import E4M3, PLAIN, UNPACKED_BYTES, WeightArguments, is_unpackable, unpack_rows
from moiety_kernels.cpu.values import LANES
from moiety_kernels.cpu.vectors import TILE_COLS, TILE_ROWS, dot_tile, dot_tiles
from moiety_kernels.quantization.weight import QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

    from moiety_kernels.quantization.weight import WeightFormat

TASKS_PER_THREAD = 3
ROW_BLOCK = 96  # rows per task: with K = 1024 they fill a third of a 1 MiB L2 cache
TILES_BLOCK_BYTES = 512 << 10  # packed rows of one task, sized for the L2 cache
WIDEN_ROWS = 4 * TILE_ROWS  # fewest rows for which widening first pays
PANEL_BYTES = 128 << 10  # of widened weight, sized for the L2 cache
PANEL_PAD = 64  # bytes between widened rows, so that they do not all map to the same cache sets
MAX_WIDTH = 65_536
CHUNK_BYTES = 512 << 10  # weight that a task reads when there are few rows; its last prefetches are of another task
UNPACKED_CHUNK_BYTES = 128 << 10  # the same of a weight that is unpacked first, sized for the L2 cache
MANY_ROWS_CHUNK_BYTES = 1 << 20  # and with many rows, which also have to be read

# how a weight is multiplied
FLOAT32, BFLOAT16, BFLOAT16_TILES, PACKED, PACKED_WORDS = range(5)  # PACKED: in place, with rows packed for it
_MULTIPLIED = (torch.bfloat16, torch.float32)
_KINDS = {paths.TILES: BFLOAT16_TILES, paths.PAIRS: PACKED, paths.WORDS: PACKED_WORDS, paths.FLOATS: BFLOAT16}
_KINDS[paths.ARM_PAIRS] = PACKED

# blocking of a product on tiles
TILES_ROWS = 512  # most rows at once
TILES_DEPTH = 1024  # most columns at once
TILES_MOST_COLUMNS = 256  # weight rows per task, where there are several blocks of columns

# layout of a thread's scratch memory
ROWS_AT = 0  # addresses of the rows, up to 1,024
PADDED_AT = 8 << 10  # addresses of one panel's rows
CONFIG_AT = 9 << 10  # the tiles' configuration
DESCRIBED_AT = 10 << 10  # two weights that are multiplied in place
WIDE_AT = 16 << 10  # a panel of widened weight rows, at least TILE_COLS of them, or packed rows
AREA_AT = WIDE_AT + TILE_COLS * (4 * MAX_WIDTH + PANEL_PAD)  # the tiles' sums of two products
AREA_BYTES = 2 * 4 * TILES_ROWS * TILES_MOST_COLUMNS
TEMP_AT = AREA_AT + AREA_BYTES
UNPACKED_AT = SCRATCH_BYTES - UNPACKED_BYTES  # rows of a quantized weight

_wide_tile, _narrow_tile = dot_tiles(TILE_COLS, widen=False), dot_tiles(TILE_COLS, widen=True)
_wide_single = dot_tile(1, 1, widen=False)
_narrow_single = dot_tile(1, 1, widen=True)


def product_kind(weight: Tensor | QuantizedWeight) -> int:
    """Return how this machine multiplies a weight of K columns, its last dimension."""
    weights = "bfloat16"
    if isinstance(weight, QuantizedWeight):
        form = weight.format
        if not form.is_float8:
            weights = "4-bit floats" if form.floating else f"{form.bits} bits"
    elif weight.dtype is torch.float32:
        return FLOAT32
    if weight.shape[-1] % tiles.DEPTH:
        return BFLOAT16
    return _KINDS[paths.serving_path(weights)]


def arithmetic() -> str:
    """Return a description of this machine's multiplication.

    Machines that multiply differently may choose different experts for the same token, so all ranks of a group must use
    the same arithmetic.
    """
    served = ", ".join(f"{weights}: {paths.serving_path(weights).name}" for weights in paths.PATHS)
    emulated = f", emulated {', '.join(sorted(EMULATED))}" if EMULATED else ""
    in_bytes = ", products of bytes" if BYTES_AVAILABLE else ""
    return f"{served}, {LANES} lanes{in_bytes}{emulated}"


def stored_as(weight: Tensor | QuantizedWeight) -> torch.dtype | WeightFormat:
    """Return the type of a weight's numbers, or its format."""
    return weight.format if isinstance(weight, QuantizedWeight) else weight.dtype


def is_unpacked(weight: Tensor | QuantizedWeight) -> bool:
    """Return whether a task widens its rows of the weight before it multiplies them."""
    return _is_unpacked(product_kind(weight), stored_as(weight))


def _is_unpacked(kind: int, stored: torch.dtype | WeightFormat) -> bool:
    return not isinstance(stored, torch.dtype) and (kind < PACKED or stored.is_float8)


def is_multipliable(*weights: Tensor | QuantizedWeight) -> bool:
    """Return whether `weight_rows` and `multiply` support these weights, which must be of one kind."""
    first = stored_as(weights[0])
    for weight in weights:  # no generator, since every product asks
        if isinstance(weight, QuantizedWeight):
            if weight.format != first or not is_unpackable(weight):
                return False
        elif weight.dtype is not first or weight.dtype not in _MULTIPLIED or not weight.is_contiguous():
            return False
    return True


@jit
def _next_rows(left: int) -> int:
    """Return how many of the remaining rows the next tile takes, so that all tiles have about the same size."""
    tiles = (left + TILE_ROWS - 1) // TILE_ROWS
    return (left + tiles - 1) // tiles


@jit
def multiply_wide(rows: int, m: int, w: int, w_stride: int, n: int, k: int, out: int, out_stride: int) -> None:
    """Compute out[:m, :n] for float32 w, which should fit in the cache; `rows` is the address of m row addresses."""
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
def multiply_narrow(rows: int, m: int, w: int, n: int, k: int, out: int, out_stride: int) -> None:
    """Compute out[:m, :n] for bfloat16 w, each weight row read once."""
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
def _pack_rows(rows: int, m: int, first_k: int, k: int, packed: int, scratch: int) -> None:
    """Write k columns of m rows as panels of 16; the rest of a panel is never read."""
    padded = scratch + PADDED_AT
    for first in range(0, m, ROWS):
        start, panel, count = rows + 8 * first, packed + 2 * k * first, min(ROWS, m - first)
        for i in range(ROWS):
            store_i64(padded, i, load_i64(start, min(i, count - 1)) + 4 * first_k)
        if count == 1:
            pack_one(padded, k, panel)
        elif count <= 4:
            pack_four(padded, k, panel)
        elif count <= 8:
            pack_eight(padded, k, panel)
        else:
            pack_all(padded, k, panel)


@jit
def _unpack_few(sums: int, height: int, m: int, out: int, out_stride: int) -> None:
    """Write a tile of sums with fewer than 16 weight rows as that many columns of m rows."""
    for i in range(m):
        for j in range(height):
            store_f32(out + i * out_stride, j, load_f32(sums + 4 * ROWS * j, i))


@jit
def _tile_sums(
    num_tiles: int, num_panels: int, fetching: int, w: int, w_stride: int, panel: int, apart: int, k: int,
    sums: int, sums_apart: int, is_first: int, height: int,
) -> None:  # fmt: skip
    if num_tiles == 1:
        if num_panels == 1:
            sums_1_1(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)
        else:
            sums_1_2(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)
    elif num_panels == 1:
        sums_2_1(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)
    elif fetching == 0:
        sums_2_2(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)
    elif fetching == 1:
        sums_2_2_fetching(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)
    else:
        sums_2_2_fetching_rest(w, w_stride, panel, apart, k, sums, sums_apart, is_first, height)


@jit
def _multiply_block(
    packed: int, m: int, w: int, w_stride: int, n: int, k: int, is_first: int, is_last: int,
    out: int, out_stride: int, area: int, scratch: int,
) -> None:  # fmt: skip
    """Add k columns' part of out[:m, :n]; the rows are in panels.

    All sums stay in `area` for the next part. If there is only one part, they are written out at once from there.
    """
    panels, apart, is_whole = (m + ROWS - 1) // ROWS, 2 * ROWS * k, is_first and is_last
    configure(ROWS, scratch + CONFIG_AT)
    column = 0
    while column < n:
        left = n - column
        num_tiles, height = (2 if left >= 2 * ROWS else 1), min(ROWS, left)
        if height < ROWS:
            configure(height, scratch + CONFIG_AT)
        for first in range(0, panels, 2):
            num_panels = min(2, panels - first)
            sums, sums_apart = area + SUMS_BYTES * (column // ROWS * panels + first), SUMS_BYTES * panels
            if is_whole:
                sums, sums_apart = area, SUMS_BYTES * 2
            fetching = first // 2 + 1 if is_whole and panels > 2 and first <= 2 and left >= 4 * ROWS else 0
            start, panel = w + column * w_stride, packed + first * apart
            _tile_sums(
                num_tiles, num_panels, fetching, start, w_stride, panel, apart, k, sums, sums_apart, is_first, height
            )
            if not is_last:
                continue
            for tile in range(num_tiles):
                for p in range(num_panels):
                    row = (first + p) * ROWS
                    target = out + row * out_stride + 4 * (column + tile * ROWS)
                    part = sums + tile * sums_apart + SUMS_BYTES * p
                    if height == ROWS:
                        unpack(part, min(ROWS, m - row), target, out_stride)
                    else:
                        _unpack_few(part, height, min(ROWS, m - row), target, out_stride)
        column += num_tiles * ROWS
    release()


@jit
def multiply_tiles(
    rows: int, m: int, w: int, other_w: int, n: int, k: int, out: int, other_out: int, out_stride: int, scratch: int
) -> None:
    """Compute out[:m, :n] for bfloat16 w on the matrix tiles, and for a second weight if there is one (else 0).

    Columns are processed one block at a time, so that rows and weight stay in the cache; a row's sums still run over
    them in one order.
    """
    packed, area = scratch + WIDE_AT, scratch + AREA_AT
    other_area = area + AREA_BYTES // 2
    for first in range(0, m, TILES_ROWS):
        count, below = min(TILES_ROWS, m - first), first * out_stride
        for first_k in range(0, k, TILES_DEPTH):
            depth = min(TILES_DEPTH, k - first_k)
            is_first, is_last = int(first_k == 0), int(first_k + depth == k)
            _pack_rows(rows + 8 * first, count, first_k, depth, packed, scratch)
            start = w + 2 * first_k
            _multiply_block(
                packed, count, start, 2 * k, n, depth, is_first, is_last, out + below, out_stride, area, scratch
            )
            if other_w:
                start = other_w + 2 * first_k
                _multiply_block(
                    packed, count, start, 2 * k, n, depth, is_first, is_last, other_out + below, out_stride,
                    other_area, scratch,
                )  # fmt: skip


@jit
def weight_rows(weight: WeightArguments, kind: int, first: int, num_rows: int, k: int, scratch: int, after: int) -> int:
    """Return `num_rows` rows of a weight from row `first` on, in the form that `multiply` takes.

    That is the address of the rows, of their description, or of unpacked rows. Rows of a second weight are placed after
    `after` rows of the first.
    """
    values, scales, numbers, shift = weight.values, weight.scales, weight.numbers, weight.shift
    if numbers != PLAIN and (kind < PACKED or numbers == E4M3):
        unpacked = scratch + UNPACKED_AT + 2 * after * k
        unpack_rows(weight, first, num_rows, k, unpacked)
        values, scales, numbers, shift, first = unpacked, 0, PLAIN, 0, 0
    if kind >= PACKED:
        at = scratch + DESCRIBED_AT + (DESCRIPTION_BYTES if after else 0)
        return describe(at, values, scales, numbers, shift, first, k)
    return values + first * k * (4 if kind == FLOAT32 else 2)


@jit
def point_rows(rows: int, first: int, stride: int, m: int) -> None:
    """Write the addresses of m evenly spaced rows."""
    for i in range(m):
        store_i64(rows, i, first + i * stride)


def row_block(kind: int, width: int) -> int:
    """Return how many rows a task takes at once."""
    if kind != BFLOAT16_TILES:
        return ROW_BLOCK
    return min(TILES_ROWS, max(ROW_BLOCK, TILES_BLOCK_BYTES // (2 * min(width, TILES_DEPTH)) // ROWS * ROWS))


@functools.lru_cache(maxsize=4096)
def chunk_of(
    kind: int,
    stored: torch.dtype | WeightFormat,
    width: int,
    num_rows: int,
    rows_at_once: int,
    num_items: int,
    together: int,
    threads: int,
) -> int:
    """Return how many of the `num_rows` rows of a weight a task takes, a multiple of 16.

    The weight is of a product kind, stored as said, with rows of `width`. The task multiplies `rows_at_once` rows with
    that many rows of each of `together` weights. There are `num_items` of these weights or blocks of rows; the result
    gives each of the `threads` some tasks.
    """
    unpacks, row_bytes = _is_unpacked(kind, stored), 2 * width
    if isinstance(stored, torch.dtype):
        row_bytes = width * stored.itemsize
    elif not unpacks:
        row_bytes = width * stored.bits // 8
    row_bytes *= together
    if rows_at_once >= WIDEN_ROWS:
        most = MANY_ROWS_CHUNK_BYTES
    else:
        most = UNPACKED_CHUNK_BYTES if unpacks and kind != BFLOAT16_TILES else CHUNK_BYTES
    chunk = max(16, most // row_bytes // 16 * 16)
    if kind == BFLOAT16_TILES and width > TILES_DEPTH:
        chunk = TILES_MOST_COLUMNS
    if unpacks:
        chunk = min(chunk, UNPACKED_BYTES // row_bytes // 16 * 16)
    while chunk > 2 * ROWS and num_items * -(-num_rows // chunk) < TASKS_PER_THREAD * threads:
        chunk = chunk // 2 // 16 * 16
    return min(chunk, -(-num_rows // 16) * 16)
