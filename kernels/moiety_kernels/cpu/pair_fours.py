"""Dot products of rows in bfloat16 with a weight in four bits, in pairs (AVX512-BF16).

Numbers times their scales are rounded to bfloat16, by a table of all 16 for each group. Few rows are multiplied with
the weight as it lies; for more rows, COLS weight rows at a time are unpacked in the same order. Offsets are multiplied
with the sums of the row's groups.

M rows, N weight rows, K width, G groups of inputs that share a scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from llvmlite import ir

from moiety_kernels.cpu.dots import (
    BLOCKS,
    FOURS_FEW,
    GROUP,
    PAIR_LANES,
    PAIRS_AVAILABLE,
    PAIRS_FEW,
    PAIRS_ROWS,
    AllColumns,
    DotsKind,
    PackedDots,
    PairDots,
    add_pairs,
    dots_function,
    narrowed,
)
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.emulated import looked_up
from moiety_kernels.cpu.instructions import EMULATED, WORDS_FEATURE
from moiety_kernels.cpu.values import F32, I8, I16, LANES, VI32, Bytes, Floats, Int, Pairs, Vector
from moiety_kernels.quantization.reference import MAGNITUDES

_BYTES, _WORDS = ir.VectorType(I8, PAIR_LANES), ir.VectorType(I16, PAIR_LANES)
_HALF_BYTES, _HALF_WORDS = ir.VectorType(I8, LANES), ir.VectorType(I16, LANES)
_INT4 = [float(number) for number in range(-8, 8)]
_E2M1 = [*MAGNITUDES, *(-one for one in MAGNITUDES)]


class _FourBits:
    """Emits the conversion of 4-bit numbers to bfloat16, each times its scale and rounded.

    The numbers index a table of all 16 values times the scales of two blocks.
    """

    def __init__(self, e: Emitter, kind: Int, shift: Int, *, halves: bool = False, offsets: bool = False) -> None:
        """Prepare the table. `kind`: see PackedDotArguments; `shift`: from an input to its scale.

        `halves`: each half of a block has a scale; a block's lower numbers are its first half, the upper ones its last.
        `offsets`: an offset, which is not added here, follows each scale.
        """
        self.e, self.shift, self.halves, self.offsets = e, shift, halves, offsets
        self.numbers = kind.equals(1).choose(e.constant(_E2M1), e.constant(_INT4))

    def two_blocks(self, values_K: Bytes, scales_G: Floats, k: Int) -> tuple[Vector, Vector]:
        """Return the inputs from k on, in the order of `pack_fours_row`."""
        both = values_K.load(k >> 1, _BYTES).extended(_WORDS, signed=False)
        second = self.e.constant([0] * LANES + [16] * LANES, _WORDS)  # its block's half of the table
        lower, upper = (both & 15) | second, (both >> 4) | second
        table = self._table(self._scaled(scales_G, k), self._scaled(scales_G, k + BLOCKS // 2))
        last = table
        if self.halves:
            last = self._table(*(self._scaled(scales_G, k + LANES + block) for block in (0, BLOCKS // 2)))
        return self._read(table, lower), self._read(last, upper)

    def group(self, values_K: Bytes, scales_G: Floats, k: Int) -> list[Vector]:
        """Return the GROUP inputs from k on, which share a scale, in the order of `two_blocks`.

        Both halves of the table are the same, so that the other number of a byte does not matter.
        """
        scaled = self._scaled(scales_G, k)
        table, parts = self._table(scaled, scaled), []
        for first in range(0, GROUP, BLOCKS):
            both = values_K.load((k + first) >> 1, _BYTES).extended(_WORDS, signed=False)
            parts += [self._read(table, both), self._read(table, both >> 4)]
        return parts

    def block(self, values_K: Bytes, scales_G: Floats, k: Int) -> Vector:
        """Return the last inputs, in their own order."""
        low = values_K.load(k >> 1, _HALF_BYTES).extended(_HALF_WORDS, signed=False)
        high = low >> 4
        scaled = self._scaled(scales_G, k)
        if not self.halves:
            return self._read(self._table(scaled, scaled), low.shuffled(high, range(PAIR_LANES)))
        second = self.e.constant([0] * LANES + [16] * LANES, _WORDS)
        index = (low.shuffled(high, range(PAIR_LANES)) & 15) | second
        return self._read(self._table(scaled, self._scaled(scales_G, k + LANES)), index)

    def _scaled(self, scales_G: Floats, k: Int) -> Vector:
        at = (k >> self.shift) << int(self.offsets)
        return self.numbers * self.e.splat(scales_G.scalar(at))

    def _table(self, first: Vector, second: Vector) -> Vector:
        return narrowed(self.e, first, second).as_(_WORDS)

    def _read(self, table: Vector, index: Vector) -> Vector:
        """Look up the table by the lowest five bits of words."""
        if WORDS_FEATURE in EMULATED:
            return looked_up(self.e, table, index).as_(VI32)
        name = "llvm.x86.avx512.permvar.hi.512"
        return Vector(self.e, self.e.intrinsic(name, _WORDS, [_WORDS] * 2, table.ir, index.ir)).as_(VI32)


def _unpack_fours(
    e: Emitter,
    values_K: Bytes,
    scales_G: Floats,
    k: Int,
    shift: Int,
    kind: Int,
    out_K: Pairs,
    *,
    halves: bool,
    offsets: bool,
) -> None:
    """Emit out = bfloat16 of a 4-bit weight row, in the order of `pack_fours_row`."""
    bits, whole = _FourBits(e, kind, shift, halves=halves, offsets=offsets), k & -BLOCKS
    for i in e.loop_if_any(whole, BLOCKS):
        for number, part in enumerate(bits.two_blocks(values_K, scales_G, i)):
            out_K[i + PAIR_LANES * number] = part
    for i in e.loop_if_any(k - whole, PAIR_LANES):
        at = i + whole
        out_K[at] = bits.block(values_K, scales_G, at)


class _Fours(AllColumns):
    """Dot products with a 4-bit weight in groups of one or more blocks, for few rows.

    They equal the products of the output of `_unpack_fours`, in the same order.
    """

    def prepare(self) -> None:
        self.bits = _FourBits(self.e, self.args.table, self.args.shift)

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        whole = self.args.k & -BLOCKS
        for i in self.e.loop_if_any(whole, BLOCKS, sums_MN):
            self.prefetch_next(w_N, i >> 1, BLOCKS // 2)
            parts_N = [self.bits.two_blocks(w, scales, i) for w, scales in zip(w_N, scales_N, strict=True)]
            self._add_parts(i, parts_N, sums_MN)
        for i in self.e.loop_if_any(self.args.k - whole, PAIR_LANES, sums_MN):
            at = whole + i
            last_N = [(self.bits.block(w, scales, at),) for w, scales in zip(w_N, scales_N, strict=True)]
            self._add_parts(at, last_N, sums_MN)

    def _add_parts(self, k: Int, parts_N: Sequence[Sequence[Vector]], sums_MN: list[Vector]) -> None:
        for part in range(len(parts_N[0])):
            at = (k + PAIR_LANES * part) * 2
            for m, row in enumerate(self.packed_M):
                x = row.load(at, VI32)
                for n, parts in enumerate(parts_N):
                    sums_MN[m * self.cols + n] = add_pairs(self.e, sums_MN[m * self.cols + n], x, parts[part])


class _WholeFours(_Fours):
    """Dot products with a 4-bit weight in groups of GROUP or more, whose table is built once for GROUP inputs."""

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        for i in self.e.loop(self.args.k, GROUP, sums_MN):
            self.prefetch_next(w_N, i >> 1, GROUP // 2)
            parts_N = [self.bits.group(w, scales, i) for w, scales in zip(w_N, scales_N, strict=True)]
            self._add_parts(i, parts_N, sums_MN)


class _HalfFours(_Fours):
    """Dot products with a 4-bit weight in groups of half a block."""

    def prepare(self) -> None:
        self.bits = _FourBits(self.e, self.args.table, self.args.shift, halves=True)


class _WithOffsets(PackedDots):
    """Adds Σ offset · X to the products, where X is the sum of a row's inputs in a group.

    Offsets lie between the scales, so a packed row has a 0 before each of its sums.
    """

    def add(self, w_N: list[Bytes], scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        super().add(w_N, scales_N, sums_MN)
        e, count = self.e, (self.args.k >> self.args.shift) << 1
        whole = count & -LANES
        for i in e.loop_if_any(whole, LANES, sums_MN):
            self._add_offsets(i, None, scales_N, sums_MN)
        for i in e.loop_if_any(count - whole, 2, sums_MN):
            self._add_offsets(whole + i, ir.VectorType(F32, 2), scales_N, sums_MN)

    def _add_offsets(self, at: Int, few: ir.VectorType | None, scales_N: list[Floats], sums_MN: list[Vector]) -> None:
        offsets_N = [self._lanes(scales, at, few) for scales in scales_N]
        for m, x_sums in enumerate(self.x_scales_M):
            x = self._lanes(x_sums, at, few)
            for n, offsets in enumerate(offsets_N):
                sums_MN[m * self.cols + n] = self.e.fma(offsets, x, sums_MN[m * self.cols + n])

    def _lanes(self, floats: Floats, at: Int, few: ir.VectorType | None) -> Vector:
        """Return LANES floats, or two and zeros."""
        if few is None:
            return floats[at]
        zeros = self.e.constant(0.0, few)
        return floats.load(at, few).shuffled(zeros, [0, 1, *[2] * (LANES - 2)])


class _OffsetFours(_WithOffsets, _Fours):
    """Dot products with a 4-bit weight in groups that have an offset."""

    def prepare(self) -> None:
        self.bits = _FourBits(self.e, self.args.table, self.args.shift, offsets=True)


class _WholeOffsetFours(_WithOffsets, _WholeFours):
    """Dot products with a 4-bit weight in groups of GROUP or more that have an offset."""

    def prepare(self) -> None:
        self.bits = _FourBits(self.e, self.args.table, self.args.shift, offsets=True)


class _OffsetPairs(_WithOffsets, PairDots):
    """Dot products with unpacked rows of a 4-bit weight in groups that have an offset."""


unpack_fours_row, unpack_half_fours_row, unpack_offset_fours_row = (
    function(
        f"moiety_pack_out_{name}",
        partial(_unpack_fours, halves=name == "half_fours", offsets=name == "offset_fours"),
        is_there=PAIRS_AVAILABLE,
    )
    for name in ("fours", "half_fours", "offset_fours")
)


def _kind(name: str, dots_of: type[PackedDots]) -> DotsKind:
    return DotsKind(name, PAIRS_AVAILABLE, dots_of, FOURS_FEW, FOURS_FEW)


# In compiled code: products of packed rows with a kind of weight in four bits.
fours, half_fours = dots_function(_kind("fours", _Fours)), dots_function(_kind("half_fours", _HalfFours))
whole_fours = dots_function(_kind("whole_fours", _WholeFours))
offset_fours = dots_function(_kind("offset_fours", _OffsetFours))
whole_offset_fours = dots_function(_kind("whole_offset_fours", _WholeOffsetFours))
offset_pairs = dots_function(DotsKind("offset_pairs", PAIRS_AVAILABLE, _OffsetPairs, PAIRS_FEW, PAIRS_ROWS))
