"""Products of rows with a bfloat16 weight on the CPU's matrix tiles (Intel AMX, `tdpbf16ps`).

The weight is the left operand and is read in place, 16 of its rows times 32 columns at once. The other rows are rounded
to bfloat16 and packed in pairs of columns, 16 rows per panel, the layout that the instruction requires of its right
operand. Sums are float32 and run over the columns in one order, so a row's result has the same bits whatever rows are
beside it. Instruction and layout: Intel's Architecture Instruction Set Extensions reference, chapter on AMX.

M rows, N weight rows, K width, T tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from moiety_kernels.cpu.dots import narrowed
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.emulated import add_products
from moiety_kernels.cpu.instructions import EMULATED, FEATURES, TILES_FEATURE, WIDE
from moiety_kernels.cpu.paths import TILES
from moiety_kernels.cpu.values import I8, I64, LANES, PTR, VI32, VOID, Addresses, Bytes, Floats, Int

ROWS = 16  # rows of a tile and of a panel
DEPTH = 32  # columns that one instruction multiplies
CONFIG_BYTES = 64
SUMS_BYTES = 4 * ROWS * ROWS  # bytes of one tile of sums

AVAILABLE = WIDE and TILES.features <= FEATURES
_SUMS, _PANELS, _WEIGHTS = (0, 1, 2, 3), (4, 5), (6, 7)  # tile registers


def _pack(e: Emitter, rows_M: Addresses, k: Int, panel: Bytes, *, rows: int) -> None:
    """Emit panel[k / 2][16][2] of `rows` float32 rows; the panel's other rows are zero."""
    x_M = rows_M.arrays(rows, Floats)
    for i in e.loop(k, DEPTH):
        pairs = [narrowed(e, x[i], x[i + LANES]) for x in x_M]
        target = panel.moved(i * (2 * ROWS))
        for pair, vector in enumerate(e.transposed([*pairs, *[e.constant(0, VI32)] * (ROWS - rows)])):
            target[4 * ROWS * pair] = vector


class SumsArguments(NamedTuple):
    """Arguments of the products of tiles of weight rows and panels, added to out[tile][panel][16][16].

    A row of the sums belongs to one weight row.
    """

    w_NK: Bytes  # bfloat16
    w_stride: Int
    panel: Bytes
    apart: Int  # bytes from one panel to the next
    k: Int
    out: Bytes  # float32
    out_apart: Int  # bytes from the sums of one tile to the next
    is_first: Int  # whether these products replace the output
    rows: Int  # weight rows of a tile, for which the tiles are configured


def _sums(e: Emitter, args: SumsArguments, *, tiles: int, panels: int, fetched: range = range(0)) -> None:
    """Emit the products of tiles and panels.

    `fetched`: cache lines of the weight rows below that are prefetched meanwhile, as many per step as there are rows.
    """

    def tile(name: str, kinds: Sequence[ir.Type], *operands: ir.Value) -> None:
        e.intrinsic(f"llvm.x86.{name}", VOID, kinds, *operands)

    def load(register: int, memory: Bytes, stride: ir.Value) -> None:
        tile("tileloadd64", [I8, PTR, I64], I8(register), memory.pointer(), stride)

    sums = [
        (_SUMS[t * panels + p], args.out.moved(args.out_apart * t + p * SUMS_BYTES))
        for t in range(tiles)
        for p in range(panels)
    ]
    w_T, below = args.w_NK.rows(args.w_stride * ROWS, tiles), args.w_NK.moved(args.w_stride * (ROWS * tiles))
    with e.builder.if_else(args.is_first.differs(0).ir) as (first, later):
        with first:
            for register, _ in sums:
                tile("tilezero", [I8], I8(register))
        with later:
            for register, memory in sums:
                load(register, memory, I64(4 * ROWS))
    for i in e.loop(args.k, DEPTH):
        for line in fetched:
            below.moved(i * (2 * ROWS * tiles)).prefetch(2 * DEPTH * line, locality=2)
        for p in range(panels):
            load(_PANELS[p], args.panel.moved(i * (2 * ROWS) + args.apart * p), I64(4 * ROWS))
        for t, w in enumerate(w_T):
            load(_WEIGHTS[t], w.moved(i * 2), args.w_stride.ir)
        for p in range(panels):  # after all loads: between them, each would wait for its own
            for t in range(tiles):
                tile("tdpbf16ps", [I8] * 3, I8(_SUMS[t * panels + p]), I8(_WEIGHTS[t]), I8(_PANELS[p]))
    for register, memory in sums:
        tile("tilestored64", [I8, PTR, I64], I8(register), memory.pointer(), I64(4 * ROWS))


def _emulated_sums(e: Emitter, args: SumsArguments, *, tiles: int, panels: int) -> None:
    """Emit the same as `_sums` for CPUs without tiles.

    TDPBF16PS adds the products of one step to a sum of their own, the lower half of each pair first, and that sum to
    the tile.
    """
    pairs = [(t, p) for t in range(tiles) for p in range(panels)]

    def sums_of(t: int, p: int, row: Int) -> Floats:
        return args.out.moved(args.out_apart * t + p * SUMS_BYTES + row * (4 * ROWS)).as_(Floats)

    with e.if_(args.is_first.differs(0)):
        for row in e.loop(args.rows, 1):
            for t, p in pairs:
                sums_of(t, p, row)[0] = e.constant(0.0)
    for i in e.loop(args.k, DEPTH):
        for row in e.loop(args.rows, 1):
            for t, p in pairs:
                weights = args.w_NK.moved(args.w_stride * (row + ROWS * t) + i * 2).as_(Floats)  # a pair each
                inputs = args.panel.moved(args.apart * p + i * (2 * ROWS))
                total = e.constant(0.0)
                for pair in range(DEPTH // 2):
                    x = inputs.load(4 * ROWS * pair, VI32)
                    total = add_products(e, total, e.splat(weights.scalar(pair)), x, upper_first=False)
                sums = sums_of(t, p, row)
                sums[0] = sums[0] + total


def _unpack(e: Emitter, sums: Floats, rows: Int, out_MN: Floats, out_stride: Int) -> None:
    """Emit out[m, :16] = sums[:, m] for m < rows ≤ 16."""
    builder = e.builder
    columns = e.transposed([sums[ROWS * row] for row in range(ROWS)])
    end = builder.append_basic_block()
    choice = builder.switch(rows.ir, end)
    following = end
    for row, vector in enumerate(columns):  # each case falls through to the row before it
        block = builder.append_basic_block()
        choice.add_case(I64(row + 1), block)
        builder.position_at_end(block)
        out_MN.moved(out_stride * row)[0] = vector
        builder.branch(following)
        following = block
    builder.position_at_end(end)


def _configure(e: Emitter, rows: Int, config: Bytes) -> None:
    """Set the tiles' sizes: `rows` of the weight and of the sums, 16 pairs of a panel, 64 bytes each.

    `config` has CONFIG_BYTES for the configuration.
    """
    if TILES_FEATURE in EMULATED:
        return
    data = [1, *[0] * 15, *[4 * ROWS, 0] * 8, *[0] * 16, *[ROWS] * 8, *[0] * 8]
    config[0] = e.constant(data, ir.VectorType(I8, CONFIG_BYTES))
    for index in (*_SUMS, *_WEIGHTS):
        config[48 + index] = rows.truncated(I8)
    e.intrinsic("llvm.x86.ldtilecfg", VOID, [PTR], config.pointer())


def _release(e: Emitter) -> None:
    if TILES_FEATURE not in EMULATED:
        e.intrinsic("llvm.x86.tilerelease", VOID, [])


def _tile_function(name: str, emit: Callable[..., None]) -> Any:
    return function(f"moiety_tiles_{name}", emit, is_there=AVAILABLE)


def _sums_function(part: str, tiles: int, panels: int, fetched: range = range(0)) -> Any:
    native = partial(_sums, tiles=tiles, panels=panels, fetched=fetched)
    emulated = partial(_emulated_sums, tiles=tiles, panels=panels)
    return _tile_function(f"sums_{tiles}_{panels}{part}", emulated if TILES_FEATURE in EMULATED else native)


pack_one, pack_four, pack_eight, pack_all = (
    _tile_function(f"pack_{rows}", partial(_pack, rows=rows)) for rows in (1, 4, 8, ROWS)
)
sums_1_1, sums_1_2, sums_2_1, sums_2_2 = (_sums_function("", tiles, panels) for tiles in (1, 2) for panels in (1, 2))
sums_2_2_fetching, sums_2_2_fetching_rest = (
    _sums_function(f"_{part}", 2, 2, range(ROWS * part, ROWS * (part + 1))) for part in (0, 1)
)
unpack = _tile_function("unpack", _unpack)
configure = _tile_function("configure", _configure)
release = _tile_function("release", _release)
