"""Products of rows of 16-bit integers with a weight in four bits, for CPUs that do not multiply pairs of bfloat16.

A byte of the weight becomes two 16-bit integers from 0 to 15, which are multiplied with those of the row and added in
pairs; a group's sum is exact, and is then multiplied with both scales. A weight is its number minus 8 times the scale,
plus an offset if there is one, so packing also adds up the row: with the sums X of its groups, scales s and offsets o,
the product is Σ s · (Σ number · x) + Σ (-8 · s + o) · X. One vector holds all scales of 128 inputs, and another one
-8 · X, and X for the offsets.

M rows, N weight rows, K width, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from llvmlite import ir

from moiety_kernels.cpu import paths
from moiety_kernels.cpu.compiling import inlined_jit, jit
from moiety_kernels.cpu.dots import (
    COLS,
    GROUP,
    SHARE_BITS,
    AllColumns,
    DotsKind,
    PackedDotArguments,
    dots_function,
    multiplied,
)
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.instructions import ARM, EMULATED, WORDS_FEATURE
from moiety_kernels.cpu.memory import load_i64
from moiety_kernels.cpu.packed import FOURS_AHEAD_BYTES, PACKED_BYTES, PAD, WeightDescription, even_part
from moiety_kernels.cpu.row_packing import pack_whole_group
from moiety_kernels.cpu.structs import struct_at
from moiety_kernels.cpu.values import F32, I8, I16, LANES, VI32, Bytes, Floats, Int, Int16s, Vector
from moiety_kernels.quantization.weight import BLOCK

ROWS = 2 if LANES == 8 else 4  # multiplied with COLS weight rows at once
_MIDDLE = 8.0  # number that stands for 0
_UNIT = 4 * LANES  # inputs whose bytes fill a vector of 16-bit integers: one or two blocks
_BYTES, _WORDS = ir.VectorType(I8, 2 * LANES), ir.VectorType(I16, 2 * LANES)
_HALF_BYTES, _HALF_WORDS = ir.VectorType(I8, BLOCK // 2), ir.VectorType(I16, BLOCK // 2)
_BLOCKS = GROUP // BLOCK
_FEW = 2  # scales of 128 inputs that are read faster one by one than as lanes of a vector


def _separated(e: Emitter, both: Vector) -> list[Vector]:
    """Return the lower and the upper numbers of bytes that are extended to 16 bits.

    Empty code between both steps: the compiler would separate the bytes first, and extend them twice.
    """
    kind = both.ir.type
    if not ARM and WORDS_FEATURE not in EMULATED:  # else the vector may not fit in a register
        both = Vector(e, e.builder.asm(ir.FunctionType(kind, [kind]), "", "=v,0", [both.ir], side_effect=False))
    return [both & 15, both >> 4]


def _sum_of_products(e: Emitter, x: Sequence[Vector], numbers: Sequence[Vector]) -> Vector:
    first, *others = (multiplied(e, *pair) for pair in zip(x, numbers, strict=True))
    return sum(others, first)


class _WordFours(AllColumns):
    """Dot products with a 4-bit weight. `blocks` of every 128 inputs share a scale, or the whole 128 or more if 4."""

    def __init__(
        self, e: Emitter, args: PackedDotArguments, num_rows: int, cols: int, *, blocks: int, offsets: bool
    ) -> None:
        super().__init__(e, args, num_rows, cols)
        self.blocks, self.per_scale = blocks, 2 if offsets else 1
        self.scales_of_group = _BLOCKS // blocks * self.per_scale

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        whole, count = self.args.k & -GROUP, len(sums_MN)
        carried = sums_MN + [self._zeros(self.scales_of_group)] * count
        for i in self.e.loop_if_any(whole, GROUP, carried):
            self.prefetch_next(w_N, i >> 1, GROUP // 2)
            self._add_group(i, w_N, scales_N, carried)
        sums_MN[:] = [self._added(*pair) for pair in zip(carried[:count], carried[count:], strict=True)]
        carried = sums_MN + [self._zeros(self.per_scale)] * count
        for i in self.e.loop_if_any(self.args.k - whole, BLOCK, carried):
            self._add_block(whole, i, w_N, scales_N, carried)
        sums_MN[:] = [self._added(*pair) for pair in zip(carried[:count], carried[count:], strict=True)]

    def _zeros(self, count: int) -> Vector:
        return self.e.constant(0.0, ir.VectorType(F32, count))

    def _added(self, sums: Vector, few: Vector) -> Vector:
        """Add a vector of at most LANES lanes to the first lanes."""
        count = few.ir.type.count
        return sums + few.shuffled(self._zeros(count), [*range(count), *[count] * (LANES - count)])

    def _fma(self, a: Vector, b: Vector, c: Vector) -> Vector:
        kind = a.ir.type
        return Vector(self.e, self.e.intrinsic(f"llvm.fma.v{kind.count}f32", kind, [kind] * 3, a.ir, b.ir, c.ir))

    def _row_sums(self, m: int) -> Floats:
        """Return -8 times the sums of a row's groups, each followed by the sum if there are offsets."""
        return self.x_scales_M[m].moved(((self.args.k + (GROUP - 1)) >> 7) * 4)

    def _first_scale(self, k: Int) -> Int:
        if self.blocks < _BLOCKS:
            return (k >> 7) * self.scales_of_group
        return (k >> self.args.shift) * self.per_scale

    def _add_group(self, k: Int, w_N: list[Bytes], scales_N: list[Floats], carried: list[Vector]) -> None:
        e, cols, rows = self.e, self.cols, len(self.packed_M)
        first, group = self._first_scale(k), k >> 7
        of_group = ir.VectorType(F32, self.scales_of_group)
        each_N = [scales.load(first, of_group) for scales in scales_N]
        self._prefetch_scales(scales_N, first)
        splats_N = [self._splats(*pair, first) for pair in zip(scales_N, each_N, strict=True)]
        totals_MN: list[Vector | None] = [None] * (rows * cols)
        products_MN: list[Vector | None] = [None] * (rows * cols)
        for unit in range(0, GROUP, _UNIT):
            x_M = [[row.load((k + (unit + half)) * 2, _WORDS) for half in (0, 2 * LANES)] for row in self.packed_M]
            is_whole = (unit + _UNIT) % (self.blocks * BLOCK) == 0 or self.blocks * BLOCK < _UNIT
            for n, (w, splats) in enumerate(zip(w_N, splats_N, strict=True)):
                numbers = _separated(e, w.load((k + unit) >> 1, _BYTES).extended(_WORDS, signed=False))
                scale = splats(unit) if is_whole else None
                for m, x in enumerate(x_M):
                    at = m * cols + n
                    product, before = _sum_of_products(e, x, numbers), products_MN[at]
                    products_MN[at] = product = product if before is None else before + product
                    if scale is not None:
                        values, total = product.to_floats(), totals_MN[at]
                        totals_MN[at] = values * scale if total is None else e.fma(values, scale, total)
                        products_MN[at] = None
        for m, x_scales in enumerate(self.x_scales_M):
            x_scale = e.splat(x_scales.scalar(group))
            sums = self._row_sums(m).load(group * self.scales_of_group, of_group)
            for n, scales in enumerate(each_N):
                at, total = m * cols + n, totals_MN[m * cols + n]
                assert total is not None
                carried[at] = e.fma(total, x_scale, carried[at])
                at += rows * cols
                carried[at] = self._fma(scales, sums, carried[at])

    def _prefetch_scales(self, scales_N: list[Floats], first: Int) -> None:
        """Prefetch the scales at this place of the next COLS weight rows, where they are a large part of a weight."""
        if self.cols > 1 and self.scales_of_group > _FEW:
            for scales in scales_N:
                following = scales.as_(Bytes).moved(self.args.scales_stride * self.cols)
                following.prefetch(first * 4, locality=2)

    def _splats(self, scales: Floats, each: Vector, first: Int) -> Callable[[int], Vector]:
        """Return the emitter of the scale of a unit's inputs; of those of its two blocks, in halves, where they differ.

        `each`: all scales of the 128 inputs, which are at `first`.
        """

        def splat(unit: int) -> Vector:
            at = unit // BLOCK // self.blocks * self.per_scale
            if self.scales_of_group <= _FEW:
                return self.e.splat(scales.scalar(first + at))
            second = at if self.blocks > 1 or _UNIT == BLOCK else at + self.per_scale
            return each.lanes([at] * (LANES // 2) + [second] * (LANES // 2))

        return splat

    def _add_block(self, whole: Int, k: Int, w_N: list[Bytes], scales_N: list[Floats], carried: list[Vector]) -> None:
        """Add a block after the last 128 inputs, whose inputs are in their own order."""
        e, cols, rows = self.e, self.cols, len(self.packed_M)
        at = whole + k
        first, of_block = (at >> self.args.shift) * self.per_scale, ir.VectorType(F32, self.per_scale)
        sums_at = (whole >> 7) * self.scales_of_group + (k >> 5) * self.per_scale
        for n, (w, scales) in enumerate(zip(w_N, scales_N, strict=True)):
            low, high = _separated(e, w.load(at >> 1, _HALF_BYTES).extended(_HALF_WORDS, signed=False))
            numbers = [low, high] if LANES == 8 else [low.shuffled(high, range(BLOCK))]
            for m, row in enumerate(self.packed_M):
                x = [row.load((at + 2 * LANES * part) * 2, _WORDS) for part in range(len(numbers))]
                product = _sum_of_products(e, x, numbers)
                scale = e.splat(scales.scalar(first)) * e.splat(self.x_scales_M[m].scalar(at >> 7))
                sums = m * cols + n
                carried[sums] = e.fma(product.to_floats(), scale, carried[sums])
                sums += rows * cols
                row_sums = self._row_sums(m).load(sums_at, of_block)
                carried[sums] = self._fma(scales.load(first, of_block), row_sums, carried[sums])


def _pack_sums(
    e: Emitter, row_K: Int16s, count: Int, x_scale: Floats, out: Floats, *, blocks: int, offsets: bool
) -> None:
    """Emit -8 · Σ row and, for offsets, Σ row after it, of each group of `blocks` blocks of a row of integers."""
    size, scale = blocks * BLOCK, x_scale.scalar()
    for i in e.loop(count, size):
        total = e.constant(0, VI32)
        for first in range(0, size, LANES):
            total = total + row_K[i + first].extended(VI32, signed=True)
        sums = e.splat(e.sum(total.to_floats()) * scale)
        at = (i >> (size.bit_length() - 1)) * (2 if offsets else 1)
        few = ir.VectorType(F32, 2 if offsets else 1)
        lanes = (sums * -_MIDDLE).shuffled(sums, [0, LANES][: few.count])
        out[at] = lanes


def _order_words(e: Emitter, row_K: Int16s, out_K: Int16s) -> None:
    """Emit 128 integers in the order in which the weight's bytes give them: two blocks at once with vectors of 16."""
    order = (
        range(0, GROUP, LANES)
        if LANES == 8
        else [16 * part for pair in (0, 4) for part in (pair, pair + 2, pair + 1, pair + 3)]
    )
    values = [row_K[first] for first in order]
    for number, value in enumerate(values):
        out_K[LANES * number] = value


_AVAILABLE = paths.is_usable(paths.WORDS)
_order = function("moiety_order_words", _order_words, is_there=_AVAILABLE)


@jit
def _stride(k: int) -> int:
    """Return the bytes from one packed row to the next: integers, a scale for 128, and at most two sums for 32."""
    return (2 * k + 4 * ((k + GROUP - 1) // GROUP) + 8 * (k // BLOCK) + 63) // 64 * 64 + PAD


@inlined_jit
def _pack(pack_sums: Any, pack_block: Any, scales_of_group: int, per_scale: int, row: int, k: int, target: int) -> None:
    scales, whole = target + 2 * k, k // GROUP * GROUP
    sums = scales + 4 * ((k + GROUP - 1) // GROUP)
    for first in range(0, k, GROUP):
        count, scale = min(GROUP, k - first), scales + 4 * (first // GROUP)
        pack_whole_group(row + 4 * first, count, target + 2 * first, scale)
        if first < whole:
            pack_sums(target + 2 * first, count, scale, sums + 4 * (first // GROUP) * scales_of_group)
            if LANES == 16:
                _order(target + 2 * first, target + 2 * first)
        else:
            pack_block(target + 2 * first, count, scale, sums + 4 * (first // GROUP) * scales_of_group)


@inlined_jit
def multiply_fours(
    dots: Any, pack_sums: Any, pack_block: Any, scales_of_group: int, per_scale: int,
    rows: int, m: int, weight: int, other: int, n: int, k: int, out: int, other_out: int, out_stride: int, area: int,
) -> None:  # fmt: skip
    """Compute out[:m, :n] of the m rows whose addresses are at `rows` with the weight described at `weight`.

    `dots`, `pack_sums`, `pack_block`: functions for the weight's groups. `other`: a second weight of the same kind, or
    0. `area`: PACKED_BYTES for packed rows.
    """
    stride = _stride(k)
    at_once = max(1, PACKED_BYTES // stride)
    for start in range(0, m, at_once):
        count = min(at_once, m - start)
        for i in range(count):
            _pack(pack_sums, pack_block, scales_of_group, per_scale, load_i64(rows, start + i), k, area + i * stride)
        parts = (count + ROWS - 1) // ROWS
        share = (COLS << SHARE_BITS) // parts
        for turn in range(2 if other else 1):
            of = struct_at(WeightDescription, other if turn else weight)
            w_bytes, s_bytes = of.row_bytes, of.scales_bytes
            whole, at_a_time = n // COLS * COLS, COLS if parts > 1 else n // COLS * COLS
            first = 0
            while first < n:
                many, i, part = first < whole, 0, 0
                columns = min(at_a_time, n - first) if many else n - first
                w, s = of.values + first * w_bytes, of.scales + first * s_bytes
                column = (other_out if turn else out) + start * out_stride + 4 * first
                while i < count:
                    step = even_part(count - i, ROWS)
                    ahead = w + FOURS_AHEAD_BYTES + COLS * w_bytes * part // parts
                    dots(
                        is_many=int(many), num_rows=step,
                        packed_MK=area + i * stride, packed_stride=stride, k=k, x_scales_at=2 * k,
                        w_NK=w, w_stride=w_bytes, n=columns, ahead=ahead, share=share,
                        scales_NG=s, scales_stride=s_bytes, shift=of.shift, table=0,
                        out_MN=column + i * out_stride, out_stride=out_stride,
                    )  # fmt: skip
                    i += step
                    part += 1
                first += columns


def _functions(blocks: int, offsets: bool) -> tuple[Any, Any, Any]:
    """Return the products with a weight, and the sums of a row's groups and of its last blocks."""
    name = f"word_fours_{blocks}_{int(offsets)}"
    dots_of = partial(_WordFours, blocks=blocks, offsets=offsets)
    products = dots_function(DotsKind(name, _AVAILABLE, dots_of, ROWS, ROWS))
    sums = (
        function(f"moiety_{name}_sums_{size}", partial(_pack_sums, blocks=size, offsets=offsets), is_there=_AVAILABLE)
        for size in (blocks, 1)
    )
    return (products, *sums)


_FUNCTIONS = {(blocks, offsets): _functions(blocks, offsets) for blocks in (1, 2, 4) for offsets in (False, True)}
(dots_32, sums_32, last_32), (dots_32_offsets, sums_32_offsets, last_32_offsets) = (
    _FUNCTIONS[1, False],
    _FUNCTIONS[1, True],
)
(dots_64, sums_64, last_64), (dots_64_offsets, sums_64_offsets, last_64_offsets) = (
    _FUNCTIONS[2, False],
    _FUNCTIONS[2, True],
)
(dots_128, sums_128, last_128), (dots_128_offsets, sums_128_offsets, last_128_offsets) = (
    _FUNCTIONS[4, False],
    _FUNCTIONS[4, True],
)
