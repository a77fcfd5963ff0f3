"""Dot products of packed rows with weight rows, two inputs per lane, for CPUs without matrix tiles.

Each task packs the rows that it multiplies. For a weight in bfloat16, or in four bits (whose numbers times their scales
are rounded to bfloat16), rows become bfloat16 and are multiplied in pairs (AVX512-BF16). For a weight in eight bits
they become 16-bit integers, of which each GROUP shares a scale (AVX512-BW; one instruction with VNNI): that takes fewer
operations than widening the weight, and keeps more of the rows' precision. Sums run over the inputs in one order, so a
row's result has the same bits whatever other rows are in the batch. `row_packing.py` packs the rows.

Few rows are multiplied with one weight row after the other: memory is then read sequentially, and the hardware
prefetcher follows (4-bit rows are so short that several are read at once). More rows are multiplied with COLS weight
rows at a time, so that the rows themselves are read less often. Each part of the rows prefetches its share of the next
weight rows, so that memory is read during computation. For them, a 4-bit weight is unpacked COLS rows at a time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.binding as llvm
from llvmlite import ir

from moiety_kernels.cpu.emitter import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI32,
    VOID,
    Emitter,
    constant,
    emit_once,
    function,
)
from moiety_kernels.cpu.emulated import add_products, looked_up, multiplied_words, rounded_pairs
from moiety_kernels.cpu.instructions import (
    EMULATED,
    FEATURES,
    PAIRS_FEATURE,
    WIDE,
    WORDS_FEATURE,
)
from moiety_kernels.quantization.reference import MAGNITUDES

if TYPE_CHECKING:
    from collections.abc import Sequence

PAIRS_FEW, FOURS_FEW, EIGHTS_FEW, COLS = 2, 4, 4, 4  # rows, for weights in bfloat16, four and eight bits
PAIRS_ROWS = 6  # rows multiplied with COLS weight rows at once: their sums fill the registers
EIGHTS_ROWS = 3  # the same for 8-bit weights, where a group's sums are kept beside the totals
GROUP = 128  # inputs of an integer row that share a scale
BLOCKS = 64  # 4-bit inputs that are read at once: two blocks
LINE = 64
SHARE_BITS = 8

PAIRS_AVAILABLE = WIDE and PAIRS_FEATURE in FEATURES
WHOLE_AVAILABLE = WIDE and WORDS_FEATURE in FEATURES
FOURS_AVAILABLE = PAIRS_AVAILABLE and WHOLE_AVAILABLE
if PAIRS_AVAILABLE and PAIRS_FEATURE not in EMULATED:
    llvm.initialize_native_asmparser()  # for instructions without a portable intrinsic

_PAIR_LANES = 2 * LANES
_BYTES, _WORDS = ir.VectorType(I8, _PAIR_LANES), ir.VectorType(I16, _PAIR_LANES)
_HALF_BYTES, _HALF_WORDS = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)
_INT4 = [float(number) for number in range(-8, 8)]
_E2M1 = [*MAGNITUDES, *(-one for one in MAGNITUDES)]


def usable(bits: int) -> bool:
    """Return whether the CPU can multiply a weight in place, in bfloat16 or in so many bits."""
    return {16: PAIRS_AVAILABLE, 8: WHOLE_AVAILABLE, 4: FOURS_AVAILABLE}[bits]


def narrowed(e: Emitter, low: ir.Value, high: ir.Value) -> ir.Value:
    """Round 32 floats to the nearest bfloat16, ties to even, as 16 pairs (AVX512-BF16)."""
    if PAIRS_FEATURE in EMULATED:
        return rounded_pairs(e, low, high, VI32)
    kind = ir.FunctionType(VI32, [VF, VF])
    return e.builder.asm(kind, "vcvtne2ps2bf16 $1, $2, $0", "=v,v,v", [low, high], side_effect=False)


def add_pairs(e: Emitter, sums: ir.Value, x: ir.Value, w: ir.Value) -> ir.Value:
    """Add two products of bfloat16 to the float in each of 16 lanes (AVX512-BF16)."""
    if PAIRS_FEATURE in EMULATED:
        return add_products(e, sums, x, w)
    kind = ir.FunctionType(VF, [VF, x.type, w.type])
    return e.builder.asm(kind, "vdpbf16ps $3, $2, $0", "=v,0,v,v", [sums, x, w], side_effect=False)


def _multiplied(e: Emitter, x: ir.Value, w: ir.Value) -> ir.Value:
    """Multiply 16-bit integers and add neighbouring products (AVX512-BW)."""
    if WORDS_FEATURE in EMULATED:
        return multiplied_words(e, x, w, VI32)
    return e.intrinsic("llvm.x86.avx512.pmaddw.d.512", VI32, [_WORDS] * 2, x, w)


class _Dots:
    """Emits out[m, n] = Σ_k row_m[k] · w[n, k] for `rows` packed rows.

    With one column, the code runs over N weight rows in sequence. With several columns, it computes these alone and
    prefetches others. Arguments: packed rows, their stride, k, offset of the scales in a packed row, w, bytes between
    its rows, N, address to prefetch from, bytes to prefetch per byte of a weight row (times 2^SHARE_BITS), the weight's
    scales, bytes between its rows of scales, the shift from an input to its scale, the table of its numbers, out, out
    stride.
    """

    num_arguments = 15

    def __init__(self, e: Emitter, rows: int, cols: int) -> None:
        self.e, self.rows, self.cols = e, rows, cols
        (packed, stride, self.count, x_scales, self.w, self.w_stride, self.num_w, self.ahead, self.share, self.scales,
         self.scales_stride, self.shift, self.table, self.out, self.out_stride) = e.function.args  # fmt: skip
        self.starts = self.spaced(packed, stride, rows)
        self.x_scales = self.spaced(e.builder.add(packed, x_scales), stride, rows)

    def emit(self) -> None:
        self.prepare()
        if self.cols > 1:
            self.columns(self.w, self.scales, self.out)
            return
        mul, add = self.e.builder.mul, self.e.builder.add

        def column(n: ir.Value) -> list[ir.Value]:
            w, scales = add(self.w, mul(self.w_stride, n)), add(self.scales, mul(self.scales_stride, n))
            self.columns(w, scales, add(self.out, mul(I64(4), n)))
            return []

        self.e.loop(self.num_w, 1, [], column)

    def columns(self, w: ir.Value, scales: ir.Value, out: ir.Value) -> None:
        """Emit the dot products of `cols` weight rows."""
        e, builder = self.e, self.e.builder
        w_N = self.spaced(w, self.w_stride, self.cols)
        scales_N = self.spaced(scales, self.scales_stride, self.cols)
        sums = self.sums(w_N, scales_N, [constant(0.0)] * (self.rows * self.cols))
        together = LANES // self.cols  # rows whose sums fill one vector
        for first in range(0, self.rows, together):
            some = min(together, self.rows - first)
            totals = self.finished(e.lane_sums(sums[first * self.cols : (first + some) * self.cols]), scales_N)
            for m in range(some):
                lanes = ir.Constant(ir.VectorType(I32, self.cols), [m * self.cols + n for n in range(self.cols)])
                part = builder.shuffle_vector(totals, totals, lanes)
                e.store(part, out, builder.mul(self.out_stride, I64(first + m)))

    def prepare(self) -> None:
        """Emit the code before all columns."""

    def sums(self, w_N: list[ir.Value], scales_N: list[ir.Value], starts: list[ir.Value]) -> list[ir.Value]:
        """Return the sums per lane, for each row and weight row."""
        raise NotImplementedError

    def finished(self, totals: ir.Value, scales_N: list[ir.Value]) -> ir.Value:
        return totals

    def spaced(self, base: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
        return [self.e.builder.add(base, self.e.builder.mul(stride, I64(index))) for index in range(count)]

    def load(self, start: ir.Value, at: ir.Value, kind: ir.Type) -> ir.Value:
        return self.e.builder.load(self.e.pointer(start, at), typ=kind, align=1)

    def ask(self, done: ir.Value, num_bytes: int) -> None:
        """Prefetch a part of the next weight rows, where several are read at once.

        `done` bytes of each row were read before; `num_bytes` of each are read now.
        """
        if self.cols > 1:
            start = self.e.builder.lshr(self.e.builder.mul(done, self.share), I64(SHARE_BITS))
            for line in range(0, self.cols * num_bytes, LINE):
                self.e.prefetch(self.ahead, self.e.builder.add(start, I64(line)), locality=2)


class _Pairs(_Dots):
    """Dot products with a bfloat16 weight."""

    def sums(self, w_N: list[ir.Value], scales_N: list[ir.Value], starts: list[ir.Value]) -> list[ir.Value]:
        def body(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            at, results = self.e.builder.mul(i, I64(2)), []
            loaded = [self.load(w, at, VI32) for w in w_N]
            self.ask(at, 2 * _PAIR_LANES)
            for m, start in enumerate(self.starts):
                x = self.load(start, at, VI32)
                results += [add_pairs(self.e, sums[m * self.cols + n], x, w) for n, w in enumerate(loaded)]
            return results

        return self.e.loop(self.count, _PAIR_LANES, starts, body)


class _FourBits:
    """Emits the conversion of 4-bit numbers to bfloat16, each times its scale and rounded.

    The numbers index a table of all 16 values times the scales of two blocks.
    """

    def __init__(self, e: Emitter, kind: ir.Value, shift: ir.Value) -> None:
        """Prepare the table. `kind`: 0 for integers, else e2m1; `shift`: from an input to its scale."""
        self.e, self.shift = e, shift
        tables = [ir.Constant(VF, one) for one in (_INT4, _E2M1)]
        self.numbers = e.builder.select(e.builder.icmp_signed("==", kind, I64(0)), *tables)

    def two_blocks(self, values: ir.Value, scales: ir.Value, i: ir.Value) -> tuple[ir.Value, ir.Value]:
        """Return the inputs from i on, in the order of `pack_fours_row`."""
        builder = self.e.builder
        wide = builder.zext(self._load(values, i, _BYTES), _WORDS)
        second = _words([0] * LANES + [16] * LANES)  # its block's half of the table
        lower = builder.or_(builder.and_(wide, _words([15] * _PAIR_LANES)), second)
        upper = builder.or_(builder.lshr(wide, _words([4] * _PAIR_LANES)), second)
        table = self._table(self._scaled(scales, i), self._scaled(scales, builder.add(i, I64(BLOCKS // 2))))
        return self._read(table, lower), self._read(table, upper)

    def block(self, values: ir.Value, scales: ir.Value, i: ir.Value) -> ir.Value:
        """Return the last inputs, in their own order."""
        builder = self.e.builder
        low = builder.zext(self._load(values, i, _HALF_BYTES), _HALF_WORDS)
        high = builder.lshr(low, ir.Constant(_HALF_WORDS, [4] * LANES))
        scaled, both = self._scaled(scales, i), ir.Constant(ir.VectorType(I32, _PAIR_LANES), list(range(_PAIR_LANES)))
        return self._read(self._table(scaled, scaled), builder.shuffle_vector(low, high, both))

    def _load(self, values: ir.Value, i: ir.Value, kind: ir.Type) -> ir.Value:
        return self.e.builder.load(self.e.pointer(values, self.e.builder.lshr(i, I64(1))), typ=kind, align=1)

    def _scaled(self, scales: ir.Value, i: ir.Value) -> ir.Value:
        at = self.e.builder.mul(self.e.builder.lshr(i, self.shift), I64(4))
        return self.e.builder.fmul(self.numbers, self.e.splat(self.e.load_scalar(scales, at)))

    def _table(self, first: ir.Value, second: ir.Value) -> ir.Value:
        return self.e.builder.bitcast(narrowed(self.e, first, second), _WORDS)

    def _read(self, table: ir.Value, index: ir.Value) -> ir.Value:
        """Look up the table by the lowest five bits of words."""
        if WORDS_FEATURE in EMULATED:
            return self.e.builder.bitcast(looked_up(self.e, table, index), VI32)
        name = "llvm.x86.avx512.permvar.hi.512"
        return self.e.builder.bitcast(self.e.intrinsic(name, _WORDS, [_WORDS] * 2, table, index), VI32)


def _words(values: Sequence[int]) -> ir.Constant:
    return ir.Constant(_WORDS, list(values))


def _unpack_fours(e: Emitter) -> None:
    """Emit out = bfloat16 of a 4-bit weight row, in the order of `pack_fours_row`.

    Arguments: values, scales, k, shift, kind, out.
    """
    values, scales, count, shift, kind, out = e.function.args
    builder, bits = e.builder, _FourBits(e, kind, shift)
    whole = builder.and_(count, I64(-BLOCKS))

    def both(i: ir.Value) -> list[ir.Value]:
        for number, part in enumerate(bits.two_blocks(values, scales, i)):
            e.store(part, out, builder.mul(builder.add(i, I64(_PAIR_LANES * number)), I64(2)))
        return []

    def last(i: ir.Value) -> list[ir.Value]:
        at = builder.add(i, whole)
        e.store(bits.block(values, scales, at), out, builder.mul(at, I64(2)))
        return []

    e.loop_if_any(whole, BLOCKS, [], both)
    e.loop_if_any(builder.sub(count, whole), _PAIR_LANES, [], last)


class _Fours(_Dots):
    """Dot products with a 4-bit weight in groups of one or more blocks, for few rows.

    They equal the products of the output of `_unpack_fours`, in the same order.
    """

    def prepare(self) -> None:
        self.bits = _FourBits(self.e, self.table, self.shift)

    def sums(self, w_N: list[ir.Value], scales_N: list[ir.Value], starts: list[ir.Value]) -> list[ir.Value]:
        builder = self.e.builder
        whole = builder.and_(self.count, I64(-BLOCKS))

        def both(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            self.ask(builder.lshr(i, I64(1)), BLOCKS // 2)
            parts = [self.bits.two_blocks(w, scales, i) for w, scales in zip(w_N, scales_N, strict=True)]
            return self._added(i, parts, sums)

        def last(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            at = builder.add(whole, i)
            parts = [(self.bits.block(w, scales, at),) for w, scales in zip(w_N, scales_N, strict=True)]
            return self._added(at, parts, sums)

        sums = self.e.loop_if_any(whole, BLOCKS, starts, both)
        return self.e.loop_if_any(builder.sub(self.count, whole), _PAIR_LANES, sums, last)

    def _added(self, i: ir.Value, parts: Sequence[Sequence[ir.Value]], sums: Sequence[ir.Value]) -> list[ir.Value]:
        builder, results = self.e.builder, list(sums)
        for part in range(len(parts[0])):
            at = builder.mul(builder.add(i, I64(_PAIR_LANES * part)), I64(2))
            for m, start in enumerate(self.starts):
                x = self.load(start, at, VI32)
                for n, words in enumerate(parts):
                    results[m * self.cols + n] = add_pairs(self.e, results[m * self.cols + n], x, words[part])
        return results


class _Eights(_Dots):
    """Dot products with an 8-bit weight that has a scale per row."""

    def sums(self, w_N: list[ir.Value], scales_N: list[ir.Value], starts: list[ir.Value]) -> list[ir.Value]:
        builder = self.e.builder
        whole = builder.and_(self.count, I64(-GROUP))
        sums = self.e.loop_if_any(whole, GROUP, starts, lambda i, *sums: self._part(i, GROUP, w_N, scales_N, sums))
        return self.e.loop_if_any(
            builder.sub(self.count, whole), _PAIR_LANES, sums,
            lambda i, *sums: self._part(builder.add(whole, i), _PAIR_LANES, w_N, scales_N, sums),
        )  # fmt: skip

    def finished(self, totals: ir.Value, scales_N: list[ir.Value]) -> ir.Value:
        scales: ir.Value = ir.Constant(VF, ir.Undefined)
        each = [self.e.load_scalar(one) for one in scales_N]
        for lane in range(LANES):
            scales = self.e.builder.insert_element(scales, each[lane % self.cols], I32(lane))
        return self.e.builder.fmul(totals, scales)

    def _part(
        self, i: ir.Value, width: int, w_N: list[ir.Value], scales_N: list[ir.Value], sums: tuple[ir.Value, ...]
    ) -> list[ir.Value]:
        """Add `width` inputs of one group."""
        e, builder = self.e, self.e.builder
        if width == GROUP:
            self.ask(i, GROUP)
        products: list[ir.Value] = [ir.Constant(VI32, [0] * LANES)] * len(sums)
        for first in range(0, width, _PAIR_LANES):
            at = builder.add(i, I64(first))
            loaded = [builder.sext(self.load(w, at, _BYTES), _WORDS) for w in w_N]
            for m, start in enumerate(self.starts):
                x = self.load(start, builder.mul(at, I64(2)), _WORDS)
                for n, w in enumerate(loaded):
                    pairs = _multiplied(e, x, w)
                    products[m * self.cols + n] = builder.add(products[m * self.cols + n], pairs)
        group = builder.mul(builder.lshr(i, I64(GROUP.bit_length() - 1)), I64(4))
        scales = [e.splat(e.load_scalar(one, group)) for one in self.x_scales]
        values = [builder.sitofp(one, VF) for one in products]
        weights = [self.weight_scale(one, i) for one in scales_N]
        results = []
        for m, scale in enumerate(scales):
            for n, weight in enumerate(weights):
                value, total = values[m * self.cols + n], sums[m * self.cols + n]
                results.append(e.fma(value if weight is None else builder.fmul(value, weight), scale, total))
        return results

    def weight_scale(self, scales: ir.Value, i: ir.Value) -> ir.Value | None:
        return None


class _GroupedEights(_Eights):
    """Dot products with an 8-bit weight that has scales of groups of one or more blocks."""

    def sums(self, w_N: list[ir.Value], scales_N: list[ir.Value], starts: list[ir.Value]) -> list[ir.Value]:
        return self.e.loop(
            self.count, _PAIR_LANES, starts, lambda i, *sums: self._part(i, _PAIR_LANES, w_N, scales_N, sums)
        )

    def finished(self, totals: ir.Value, scales_N: list[ir.Value]) -> ir.Value:
        return totals

    def weight_scale(self, scales: ir.Value, i: ir.Value) -> ir.Value | None:
        return self.e.splat(self.e.load_scalar(scales, self.e.builder.mul(self.e.builder.lshr(i, self.shift), I64(4))))


def _choose(e: Emitter) -> None:
    """Call the function for a kind, few or many rows, and a number of rows known only at run time."""
    kind, is_many, rows, *args = e.function.args
    builder = e.builder
    which = builder.add(builder.mul(kind, I64(2)), is_many)
    others = builder.append_basic_block()
    choice = builder.switch(builder.add(builder.mul(which, I64(_MOST_ROWS)), rows), others)
    for number, (name, is_there, dots_of, few, many) in enumerate(_KINDS):
        variants = [(m, 1) for m in range(1, few + 1)] + [(m, COLS) for m in range(1, many + 1)]
        for m, cols in variants if is_there else ():

            def emit(inner: Emitter, dots_of: type[_Dots] = dots_of, m: int = m, cols: int = cols) -> None:
                dots_of(inner, m, cols).emit()

            one = emit_once(e.module, f"moiety_{name}_{m}_{cols}", [I64] * _Dots.num_arguments, emit, VOID)
            block = builder.append_basic_block()
            choice.add_case(I64((2 * number + int(cols > 1)) * _MOST_ROWS + m), block)
            builder.position_at_end(block)
            builder.call(one, args)
            builder.ret_void()
    builder.position_at_end(others)


unpack_fours_row = function("moiety_pack_out_fours", [I64] * 6, _unpack_fours if FOURS_AVAILABLE else lambda _: None)

# kinds of weights: bfloat16, four bits, eight bits with a scale per row, eight bits with scales of groups
PAIRS, FOURS, EIGHTS, GROUPED_EIGHTS = range(4)
_KINDS = (
    ("pairs", PAIRS_AVAILABLE, _Pairs, PAIRS_FEW, PAIRS_ROWS),
    ("fours", FOURS_AVAILABLE, _Fours, FOURS_FEW, FOURS_FEW),
    ("eights", WHOLE_AVAILABLE, _Eights, EIGHTS_FEW, EIGHTS_ROWS),
    ("grouped_eights", WHOLE_AVAILABLE, _GroupedEights, EIGHTS_FEW, EIGHTS_ROWS),
)
_MOST_ROWS = 16  # more than any kind takes at once
# (kind, many rows or few, number of rows, arguments of `_Dots`); a kind whose instructions the CPU lacks has no code
# and is never called
dots = function("moiety_dots", [I64] * (3 + _Dots.num_arguments), _choose)
