"""Dot products of packed rows with weight rows, two inputs per lane, for CPUs without matrix tiles.

Each task packs the rows that it multiplies. For a weight in bfloat16, or in four bits (whose numbers times their scales
are rounded to bfloat16), rows become bfloat16 and are multiplied in pairs (AVX512-BF16). For a weight in eight bits
they become 16-bit integers, of which each GROUP shares a scale (AVX512-BW; one instruction with VNNI): that takes fewer
operations than widening the weight, and keeps more of the rows' precision. Sums run over the inputs in one order, so a
row's result has the same bits whatever other rows are in the batch. `row_packing.py` packs the rows.

Few rows are multiplied with one weight row after the other: memory is then read sequentially, and what follows is
prefetched (4-bit rows are so short that several are read at once). More rows are multiplied with COLS weight rows at a
time, so that the rows themselves are read less often. Each part of the rows prefetches its share of the next weight
rows, so that memory is read during computation. `pair_fours.py` has the products of pairs with 4-bit weights.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from moiety_kernels.cpu import paths
from moiety_kernels.cpu.arm_instructions import UPPER_FACTORS, arm_add_bytes, arm_add_pairs, arm_narrowed
from moiety_kernels.cpu.emitter import Emitter, call, emit_once, function
from moiety_kernels.cpu.emulated import add_products, multiplied_halves, multiplied_words, rounded_pairs
from moiety_kernels.cpu.instructions import (
    ARM,
    ARM_BYTES_FEATURE,
    ARM_FEATURE,
    EMULATED,
    FEATURES,
    PAIRS_FEATURE,
    WIDE,
    WORDS_FEATURE,
)
from moiety_kernels.cpu.values import I8, I16, LANES, VF, VI32, Bytes, Floats, Int, Vector

PAIRS_FEW, FOURS_FEW, EIGHTS_FEW, COLS = 2, 4, 4, 4  # rows, for weights in bfloat16, four and eight bits
PAIRS_ROWS = 6 if WIDE else 2  # rows multiplied with COLS weight rows at once: their sums fill the registers
EIGHTS_ROWS = 3 if WIDE else 2  # the same for 8-bit weights, where a group's sums are kept beside the totals
GROUP = 128  # inputs of an integer row that share a scale
BLOCKS = 64  # 4-bit inputs that are read at once: two blocks
LINE = 64
AHEAD_BYTES = 4 << 10  # prefetch distance into the L2 cache, of rows that are multiplied one after the other
SHARE_BITS = 8

BYTES_AVAILABLE = {ARM_FEATURE, ARM_BYTES_FEATURE} <= FEATURES  # each number of a row is packed as two bytes
PAIRS_AVAILABLE, WHOLE_AVAILABLE = paths.is_usable(paths.PAIRS), paths.is_usable(paths.WORDS)
PLAIN_PAIRS_AVAILABLE = PAIRS_AVAILABLE or paths.is_usable(paths.ARM_PAIRS)  # with weights in bfloat16
PAIR_LANES = 2 * LANES
_BYTES, _WORDS = ir.VectorType(I8, PAIR_LANES), ir.VectorType(I16, PAIR_LANES)
_SPLIT = ir.VectorType(I8, 2 * PAIR_LANES)  # upper and lower bytes of PAIR_LANES integers


def narrowed(e: Emitter, low: Vector, high: Vector) -> Vector:
    """Round 2 · LANES floats to the nearest bfloat16, ties to even, as pairs (AVX512-BF16, or Arm's BF16)."""
    if ARM:
        return arm_narrowed(e, low, high)
    if PAIRS_FEATURE in EMULATED:
        return rounded_pairs(e, low, high)
    kind = ir.FunctionType(VI32, [VF, VF])
    code = "vcvtne2ps2bf16 $1, $2, $0"
    return Vector(e, e.builder.asm(kind, code, "=v,v,v", [low.ir, high.ir], side_effect=False))


def add_pairs(e: Emitter, sums: Vector, x: Vector, w: Vector) -> Vector:
    """Add two products of bfloat16 to the float in each lane (AVX512-BF16, or Arm's BF16)."""
    if ARM:
        return arm_add_pairs(e, sums, x, w)
    if PAIRS_FEATURE in EMULATED:
        return add_products(e, sums, x, w)
    kind = ir.FunctionType(VF, [VF, x.ir.type, w.ir.type])
    code = "vdpbf16ps $3, $2, $0"
    return Vector(e, e.builder.asm(kind, code, "=v,0,v,v", [sums.ir, x.ir, w.ir], side_effect=False))


def multiplied(e: Emitter, x: Vector, w: Vector) -> Vector:
    """Multiply 16-bit integers and add neighbouring products (AVX512-BW, or AVX2 with vectors of 8 floats)."""
    if WORDS_FEATURE in EMULATED:
        return multiplied_words(e, x, w)
    if ARM:
        return multiplied_halves(x, w)
    name = "llvm.x86.avx512.pmaddw.d.512" if WIDE else "llvm.x86.avx2.pmadd.wd"
    return Vector(e, e.intrinsic(name, VI32, [_WORDS] * 2, x.ir, w.ir))


def _add_words(e: Emitter, sums: Vector, x: Vector, w: Vector) -> Vector:
    """Add the products of a row's integers with those of a weight, as `_Eights` loads both."""
    return arm_add_bytes(e, sums, x, w) if BYTES_AVAILABLE else sums + multiplied(e, x, w)


class PackedDotArguments(NamedTuple):
    """Arguments of out[m, n] = Σ_k row_m[k] · w[n, k] for packed rows."""

    is_many: Int  # whether COLS weight rows are multiplied, else n, one after the other
    num_rows: Int
    packed_MK: Bytes
    packed_stride: Int
    k: Int
    x_scales_at: Int  # bytes from the start of a packed row to its scales
    w_NK: Bytes
    w_stride: Int
    n: Int
    ahead: Bytes  # memory to prefetch
    share: Int  # bytes to prefetch per byte of a weight row, times 2^SHARE_BITS
    scales_NG: Floats  # of the weight
    scales_stride: Int
    shift: Int  # from an input to its scale
    table: Int  # of a 4-bit weight's numbers: 0 for integers, 1 for e2m1, 2 for integers with offsets
    out_MN: Floats
    out_stride: Int


class PackedDots:
    """Emits the dot products of `num_rows` packed rows.

    With one column, the code runs over all N weight rows in sequence. With several columns, it computes these alone and
    prefetches others.
    """

    locality = 2  # of the memory that is prefetched: into the L2 cache

    def __init__(self, e: Emitter, args: PackedDotArguments, num_rows: int, cols: int) -> None:
        self.e, self.args, self.cols = e, args, cols
        self.packed_M = args.packed_MK.rows(args.packed_stride, num_rows)
        scales = args.packed_MK.moved(args.x_scales_at).as_(Floats)
        self.x_scales_M = scales.rows(args.packed_stride, num_rows)

    def emit(self) -> None:
        args = self.args
        self.prepare()
        if self.cols > 1:
            self.columns(args.w_NK, args.scales_NG, args.out_MN)
            return
        for n in self.e.loop(args.n, 1):
            w_K, scales_G = args.w_NK.moved(args.w_stride * n), args.scales_NG.moved(args.scales_stride * n)
            self.columns(w_K, scales_G, args.out_MN.moved(n * 4))

    def columns(self, w: Bytes, scales: Floats, out: Floats) -> None:
        """Emit the dot products of `cols` weight rows."""
        w_N, scales_N = w.rows(self.args.w_stride, self.cols), scales.rows(self.args.scales_stride, self.cols)
        sums_MN = [self.e.constant(0.0)] * (len(self.packed_M) * self.cols)
        self.add(w_N, scales_N, sums_MN)
        self.e.store_lane_sums(sums_MN, self.cols, out, self.args.out_stride, self.factors(scales_N))

    def prepare(self) -> None:
        """Emit the code before all columns."""

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        """Add to the sums per lane, for each row and weight row."""
        raise NotImplementedError

    def factors(self, scales_N: list[Floats]) -> Vector | None:
        """Return factors of the sums over all lanes, those of the columns again and again."""
        return None

    def prefetch_next(self, w_N: list[Bytes], done: Int, num_bytes: int) -> None:
        """Prefetch as much of the weight as is read now: what follows one row, or the share of the next COLS rows.

        `done` bytes of each row were read before; `num_bytes` of each are read now.
        """
        if self.cols == 1:
            for line in range(0, num_bytes, LINE):
                w_N[0].prefetch(done + (AHEAD_BYTES + line), locality=2)
            return
        start = (done * self.args.share) >> SHARE_BITS
        for line in range(0, self.cols * num_bytes, LINE):
            self.args.ahead.prefetch(start + line, locality=self.locality)


class AllColumns(PackedDots):
    """Emits the products with all of the N weight rows, COLS at a time, if there are as many columns."""

    locality = 3  # these are few and short rows, which the next ones follow soon

    def emit(self) -> None:
        if self.cols == 1:
            super().emit()
            return
        self.prepare()
        args = self.args
        for n in self.e.loop(args.n, self.cols):
            w_NK, scales_NG = args.w_NK.moved(args.w_stride * n), args.scales_NG.moved(args.scales_stride * n)
            self.args = args._replace(ahead=args.ahead.moved(args.w_stride * n))
            self.columns(w_NK, scales_NG, args.out_MN.moved(n * 4))
        self.args = args


class PairDots(PackedDots):
    """Dot products with a bfloat16 weight."""

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        for k in self.e.loop(self.args.k, PAIR_LANES, sums_MN):
            at = k * 2
            weights_N = [w.load(at, VI32) for w in w_N]
            self.prefetch_next(w_N, at, 2 * PAIR_LANES)
            for m, row in enumerate(self.packed_M):
                x = row.load(at, VI32)
                for n, weights in enumerate(weights_N):
                    sums_MN[m * self.cols + n] = add_pairs(self.e, sums_MN[m * self.cols + n], x, weights)


class _Eights(PackedDots):
    """Dot products with an 8-bit weight that has a scale per row."""

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        whole = self.args.k & -GROUP
        for i in self.e.loop_if_any(whole, GROUP, sums_MN):
            self._add_part(i, GROUP, w_N, scales_N, sums_MN)
        for i in self.e.loop_if_any(self.args.k - whole, PAIR_LANES, sums_MN):
            self._add_part(whole + i, PAIR_LANES, w_N, scales_N, sums_MN)

    def factors(self, scales_N: list[Floats]) -> Vector | None:
        """Return the scales of the weight rows."""
        builder, factors = self.e.builder, ir.Constant(VF, ir.Undefined)
        each = [scales.scalar() for scales in scales_N]
        for lane in range(LANES):
            factors = builder.insert_element(factors, each[lane % self.cols].ir, ir.IntType(32)(lane))
        return Vector(self.e, factors)

    def _add_part(self, k: Int, width: int, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        """Add `width` inputs of one group."""
        e, cols = self.e, self.cols
        if width == GROUP or cols == 1:
            self.prefetch_next(w_N, k, width)
        products_MN = [e.constant(0, VI32)] * len(sums_MN)
        for first in range(0, width, PAIR_LANES):
            at = k + first
            weights_N = [w.load(at, _BYTES) for w in w_N]
            if not BYTES_AVAILABLE:
                weights_N = [weights.extended(_WORDS, signed=True) for weights in weights_N]
            for m, row in enumerate(self.packed_M):
                x = row.load(at * 2, _SPLIT if BYTES_AVAILABLE else _WORDS)
                for n, weights in enumerate(weights_N):
                    products_MN[m * cols + n] = _add_words(e, products_MN[m * cols + n], x, weights)
        group = k >> (GROUP.bit_length() - 1)
        x_scale_M = [e.splat(scales.scalar(group)) for scales in self.x_scales_M]
        values_MN = [products.to_floats() for products in products_MN]
        if BYTES_AVAILABLE:
            values_MN = [values * e.constant(UPPER_FACTORS) for values in values_MN]
        w_scale_N = [self.weight_scale(scales, k) for scales in scales_N]
        for m, x_scale in enumerate(x_scale_M):
            for n, w_scale in enumerate(w_scale_N):
                values = values_MN[m * cols + n]
                scaled = values if w_scale is None else values * w_scale
                sums_MN[m * cols + n] = e.fma(scaled, x_scale, sums_MN[m * cols + n])

    def weight_scale(self, scales_G: Floats, k: Int) -> Vector | None:
        return None


class _GroupedEights(_Eights):
    """Dot products with an 8-bit weight that has scales of groups of one or more blocks."""

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        for k in self.e.loop(self.args.k, PAIR_LANES, sums_MN):
            self._add_part(k, PAIR_LANES, w_N, scales_N, sums_MN)

    def factors(self, scales_N: list[Floats]) -> Vector | None:
        return None

    def weight_scale(self, scales_G: Floats, k: Int) -> Vector | None:
        return self.e.splat(scales_G.scalar(k >> self.args.shift))


class DotsKind(NamedTuple):
    """Products with one kind of weight."""

    name: str
    is_there: bool  # whether the CPU has the instructions
    dots_of: Callable[..., PackedDots]
    few: int  # most rows for which weight rows are multiplied one after the other
    most: int  # rows at a time with COLS weight rows


def _emit_dots(
    e: Emitter, args: PackedDotArguments, *, dots_of: Callable[..., PackedDots], num_rows: int, cols: int
) -> None:
    dots_of(e, args, num_rows, cols).emit()


def _of_kind(e: Emitter, args: PackedDotArguments, *, kind: DotsKind) -> None:
    """Call the function for few or many rows, and a number of rows known only at run time."""
    variants = [(m, 1) for m in range(1, kind.few + 1)] + [(m, COLS) for m in range(1, kind.most + 1)]
    with e.switch(args.is_many * _MAX_ROWS + args.num_rows) as case:
        for m, cols in variants:
            emit = partial(_emit_dots, dots_of=kind.dots_of, num_rows=m, cols=cols)
            block_dot = emit_once(e.module, f"moiety_{kind.name}_{m}_{cols}", emit)
            with case(int(cols > 1) * _MAX_ROWS + m):
                call(e, block_dot, *args)


def dots_function(kind: DotsKind) -> Any:
    """Return the products of packed rows with a kind of weight, for calls in compiled code."""
    return function(f"moiety_{kind.name}", partial(_of_kind, kind=kind), is_there=kind.is_there)


_MAX_ROWS = 16  # more than any kind takes at once
PAIRS = DotsKind("pairs", PLAIN_PAIRS_AVAILABLE, PairDots, PAIRS_FEW, PAIRS_ROWS)  # a weight in bfloat16
EIGHTS = DotsKind("eights", WHOLE_AVAILABLE, _Eights, EIGHTS_FEW, EIGHTS_ROWS)  # in eight bits with a scale per row
GROUPED_EIGHTS = DotsKind("grouped_eights", WHOLE_AVAILABLE, _GroupedEights, EIGHTS_FEW, EIGHTS_ROWS)  # of groups

# In compiled code: products of packed rows with a kind of weight.
pairs, eights, grouped_eights = map(dots_function, (PAIRS, EIGHTS, GROUPED_EIGHTS))
