"""Products of rows with a bfloat16 weight on the CPU's matrix tiles (Intel AMX, `tdpbf16ps`).

The weight is the left operand and is read in place, 16 of its rows times 32 columns at once. The other rows are rounded
to bfloat16 and packed in pairs of columns, 16 rows per panel, the layout that the instruction requires of its right
operand. Sums are float32 and run over the columns in one order, so a row's result has the same bits whatever rows are
beside it. Instruction and layout: Intel's Architecture Instruction Set Extensions reference, chapter on AMX.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING

import torch
from llvmlite import ir

from moiety_kernels.cpu.dots import narrowed
from moiety_kernels.cpu.emitter import I8, I64, LANES, PTR, VI32, VOID, Emitter, constant, function
from moiety_kernels.cpu.emulated import add_products
from moiety_kernels.cpu.instructions import EMULATED, FEATURES, PAIRS_FEATURE, TILES_FEATURE, WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

ROWS = 16  # rows of a tile and of a panel
DEPTH = 32  # columns that one instruction multiplies
CONFIG_BYTES = 64
SUMS_BYTES = 4 * ROWS * ROWS  # bytes of one tile of sums

AVAILABLE = WIDE and {"amx-tile", TILES_FEATURE, PAIRS_FEATURE} <= FEATURES
_SUMS, _PANELS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


@functools.cache
def usable() -> bool:
    """Return whether the CPU has the tiles and the system lets this process use them, or they are emulated."""
    if TILES_FEATURE in EMULATED:
        return AVAILABLE
    return AVAILABLE and bool(torch.cpu._is_amx_tile_supported() and torch.cpu._init_amx())


def _lanes(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(VI32, list(values))


def _pack(e: Emitter, rows: int) -> None:
    """Emit panel[k / 2][16][2] of `rows` float32 rows; the panel's other rows are zero.

    Arguments: row addresses, k, panel.
    """
    pointers, count, panel = e.function.args
    builder = e.builder
    starts = [builder.load(e.pointer(pointers, 8 * m), typ=I64, align=8) for m in range(rows)]

    def body(i: ir.Value) -> list[ir.Value]:
        offset = builder.mul(i, I64(4))
        pairs = []
        for start in starts:
            low, high = e.load(start, offset), e.load(start, builder.add(offset, I64(4 * LANES)))
            pairs.append(narrowed(e, low, high))
        target = builder.mul(i, I64(2 * ROWS))
        for pair, vector in enumerate(e.transposed([*pairs, *[_lanes([0] * LANES)] * (ROWS - rows)])):
            e.store(vector, panel, builder.add(target, I64(4 * ROWS * pair)))
        return []

    e.loop(count, DEPTH, [], body)


def _sums(e: Emitter, tiles: int, panels: int, fetched: range = range(0)) -> None:
    """Emit the products of tiles of weight rows and panels, added to out[tile][panel][16][16].

    The first products replace the output. A row of the sums belongs to one weight row. `fetched`: cache lines of the
    weight rows below that are prefetched meanwhile, as many per step as there are rows. Arguments: w, w stride, panel,
    bytes between panels, k, out, bytes between its tiles, whether these are the first, weight rows of a tile, for which
    the tiles are configured.
    """
    w, w_stride, panel, apart, count, out, out_apart, is_first, _ = e.function.args
    builder = e.builder

    def tile(name: str, kinds: Sequence[ir.Type], *args: ir.Value) -> None:
        e.intrinsic(f"llvm.x86.{name}", VOID, kinds, *args)

    sums = [
        (t * panels + p, builder.add(builder.mul(out_apart, I64(t)), I64(p * SUMS_BYTES)))
        for t in range(tiles)
        for p in range(panels)
    ]
    starts = [builder.add(w, builder.mul(w_stride, I64(ROWS * index))) for index in range(tiles)]
    below = builder.add(w, builder.mul(w_stride, I64(ROWS * tiles)))
    with builder.if_else(builder.icmp_signed("!=", is_first, I64(0))) as (first, later):
        with first:
            for index, _ in sums:
                tile("tilezero", [I8], I8(_SUMS[index]))
        with later:
            for index, offset in sums:
                tile("tileloadd64", [I8, PTR, I64], I8(_SUMS[index]), e.pointer(out, offset), I64(4 * ROWS))

    def body(i: ir.Value) -> list[ir.Value]:
        across, down = builder.mul(i, I64(2)), builder.mul(i, I64(2 * ROWS))
        following = builder.add(below, builder.mul(i, I64(2 * ROWS * tiles)))
        for line in fetched:
            e.prefetch(following, I64(2 * DEPTH * line), locality=2)
        for p in range(panels):
            at = e.pointer(panel, builder.add(down, builder.mul(apart, I64(p))))
            tile("tileloadd64", [I8, PTR, I64], I8(_PANELS[p]), at, I64(4 * ROWS))
        for t, start in enumerate(starts):
            tile("tileloadd64", [I8, PTR, I64], I8(_WEIGHTS[t]), e.pointer(start, across), w_stride)
        for p in range(panels):  # after all loads: between them, each would wait for its own
            for t in range(tiles):
                tile("tdpbf16ps", [I8] * 3, I8(_SUMS[t * panels + p]), I8(_WEIGHTS[t]), I8(_PANELS[p]))
        return []

    e.loop(count, DEPTH, [], body)
    for index, offset in sums:
        tile("tilestored64", [I8, PTR, I64], I8(_SUMS[index]), e.pointer(out, offset), I64(4 * ROWS))


def _emulated_sums(e: Emitter, tiles: int, panels: int) -> None:
    """Emit the same as `_sums` for CPUs without tiles.

    TDPBF16PS adds the products of one step to a sum of their own, the lower half of each pair first, and that sum to
    the tile.
    """
    w, w_stride, panel, apart, count, out, out_apart, is_first, rows = e.function.args
    builder = e.builder
    pairs = [(t, p) for t in range(tiles) for p in range(panels)]

    def at(t: int, p: int, row: ir.Value) -> ir.Value:
        tile = builder.add(out, builder.mul(out_apart, I64(t)))
        return builder.add(builder.add(tile, I64(p * SUMS_BYTES)), builder.mul(row, I64(4 * ROWS)))

    def clear(row: ir.Value) -> list[ir.Value]:
        for t, p in pairs:
            e.store(constant(0.0), at(t, p, row))
        return []

    def step(i: ir.Value) -> list[ir.Value]:
        across, down = builder.mul(i, I64(2)), builder.mul(i, I64(2 * ROWS))

        def add(row: ir.Value) -> list[ir.Value]:
            for t, p in pairs:
                weights = builder.add(w, builder.mul(w_stride, builder.add(row, I64(ROWS * t))))
                weights, inputs = builder.add(weights, across), builder.add(panel, builder.mul(apart, I64(p)))
                total = constant(0.0)
                for pair in range(DEPTH // 2):
                    one = e.splat(e.load_scalar(weights, 4 * pair))
                    other = e.load(builder.add(inputs, down), 4 * ROWS * pair)
                    total = add_products(e, total, one, other, upper_first=False)
                e.store(builder.fadd(e.load(at(t, p, row)), total), at(t, p, row))
            return []

        e.loop(rows, 1, [], add)
        return []

    with builder.if_then(builder.icmp_signed("!=", is_first, I64(0))):
        e.loop(rows, 1, [], clear)
    e.loop(count, DEPTH, [], step)


def _unpack(e: Emitter) -> None:
    """Emit out[m, :16] = sums[:, m] for m < rows ≤ 16; arguments: sums, rows, out, out stride."""
    sums, rows, out, out_stride = e.function.args
    builder = e.builder
    turned = e.transposed([e.load(sums, 4 * ROWS * row) for row in range(ROWS)])
    end = builder.append_basic_block()
    choice = builder.switch(rows, end)
    following = end
    for row, vector in enumerate(turned):  # each case falls through to the row before it
        block = builder.append_basic_block()
        choice.add_case(I64(row + 1), block)
        builder.position_at_end(block)
        e.store(vector, out, builder.mul(out_stride, I64(row)))
        builder.branch(following)
        following = block
    builder.position_at_end(end)


def _configure(e: Emitter) -> None:
    """Set the tiles' sizes: `rows` of the weight and of the sums, 16 pairs of a panel, 64 bytes each.

    Arguments: rows, CONFIG_BYTES of memory for the configuration.
    """
    rows, config = e.function.args
    if TILES_FEATURE in EMULATED:
        return
    builder = e.builder
    data = [1, *[0] * 15, *[4 * ROWS, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8]
    builder.store(ir.Constant(ir.VectorType(I8, CONFIG_BYTES), data), e.pointer(config), align=1)
    for index in (*_SUMS, *_WEIGHTS):
        builder.store(builder.trunc(rows, I8), e.pointer(config, 48 + index), align=1)
    e.intrinsic("llvm.x86.ldtilecfg", VOID, [PTR], e.pointer(config))


def _release(e: Emitter) -> None:
    if TILES_FEATURE not in EMULATED:
        e.intrinsic("llvm.x86.tilerelease", VOID, [])


def _tile_function(name: str, num_arguments: int, emit: Callable[[Emitter], None]) -> Any:
    """Return the function, empty where the CPU has no tiles: it does not compile there and is never called."""
    return function(f"moiety_tiles_{name}", [I64] * num_arguments, emit if AVAILABLE else lambda _: None)


def _sums_function(part: str, tiles: int, panels: int, fetched: range = range(0)) -> Any:
    native = partial(_sums, tiles=tiles, panels=panels, fetched=fetched)
    emulated = partial(_emulated_sums, tiles=tiles, panels=panels)
    return _tile_function(f"sums_{tiles}_{panels}{part}", 9, emulated if TILES_FEATURE in EMULATED else native)


pack_one, pack_four, pack_eight, pack_all = (
    _tile_function(f"pack_{rows}", 3, partial(_pack, rows=rows)) for rows in (1, 4, 8, ROWS)
)
sums_1_1, sums_1_2, sums_2_1, sums_2_2 = (_sums_function("", tiles, panels) for tiles in (1, 2) for panels in (1, 2))
sums_2_2_fetching, sums_2_2_fetching_rest = (
    _sums_function(f"_{part}", 2, 2, range(ROWS * part, ROWS * (part + 1))) for part in (0, 1)
)
unpack = _tile_function("unpack", 4, _unpack)
configure = _tile_function("configure", 2, _configure)
release = _tile_function("release", 0, _release)
