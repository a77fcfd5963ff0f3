"""Emulation, in portable LLVM code, of the instructions that `instructions` lists as emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

from moiety_kernels.cpu.values import I16, I32, VF, VI32, Vector

if TYPE_CHECKING:
    from moiety_kernels.cpu.emitter import Emitter

_PAIRED = 32  # halves of 16 lanes
_EXPONENT = 0x7F80_0000  # bits of a float; one with none of them set counts as zero


def rounded_pairs(e: Emitter, low: Vector, high: Vector) -> Vector:
    """Emulate VCVTNE2PS2BF16: the nearest bfloat16 of both, ties to even, `high` after `low`, as pairs."""
    halves = []
    for value in (low, high):
        bits = value.as_(VI32)
        odd = (bits >> 16) & 1
        nearest = (bits + (odd + 0x7FFF)) >> 16
        nan = (bits >> 16) | 0x40
        zero = (bits & (1 << 31)) >> 16
        is_small = (bits & _EXPONENT).equals(0)
        nearest = value.is_nan().choose(nan, nearest)
        nearest = is_small.choose(zero, nearest)
        halves.append(nearest.truncated(ir.VectorType(I16, VF.count)))
    return halves[0].shuffled(halves[1], range(_PAIRED)).as_(VI32)


def add_products(e: Emitter, sums: Vector, x: Vector, w: Vector, *, upper_first: bool = True) -> Vector:
    """Emulate VDPBF16PS: two products of bfloat16 added to each float, that of the upper halves first."""

    def half(pairs: Vector, *, upper: bool) -> Vector:
        bits = pairs.as_(VI32)
        return ((bits & 0xFFFF_0000) if upper else (bits << 16)).as_(VF)

    for upper in (upper_first, not upper_first):
        sums = e.fma(half(x, upper=upper), half(w, upper=upper), sums)
    return sums


def multiplied_words(e: Emitter, x: Vector, w: Vector) -> Vector:
    """Emulate VPMADDWD: products of signed 16-bit integers, neighbours added."""
    wide = ir.VectorType(I32, _PAIRED)
    products = x.extended(wide, signed=True) * w.extended(wide, signed=True)
    even, odd = (products.lanes(range(first, _PAIRED, 2)) for first in (0, 1))
    return even + odd


def multiplied_halves(x: Vector, w: Vector) -> Vector:
    """Multiply 16-bit integers and add the products of both halves: VPMADDWD's sum over all lanes, for NEON."""
    count = VI32.count
    low, high = (
        x.lanes(half).extended(VI32, signed=True) * w.lanes(half).extended(VI32, signed=True)
        for half in (range(count), range(count, 2 * count))
    )
    return low + high


def looked_up(e: Emitter, table: Vector, index: Vector) -> Vector:
    """Emulate VPERMW: table words selected by the lowest five bits of each index word."""
    builder, result = e.builder, ir.Constant(table.ir.type, ir.Undefined)
    index = index & (_PAIRED - 1)
    for lane in range(_PAIRED):
        at = builder.zext(builder.extract_element(index.ir, I32(lane)), I32)
        result = builder.insert_element(result, builder.extract_element(table.ir, at), I32(lane))
    return Vector(e, result)
