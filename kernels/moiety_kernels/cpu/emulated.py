"""Emulation, in portable LLVM code, of the instructions that `instructions` lists as emulated."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llvmlite import ir

if TYPE_CHECKING:
    from moiety_kernels.cpu.emitter import Emitter

_PAIRED = 32  # halves of 16 lanes
_FLUSHED = 0x7F80_0000  # the exponent's bits; a float with none set counts as zero


def _every(kind: ir.VectorType, value: int) -> ir.Constant:
    return ir.Constant(kind, [value] * kind.count)


def rounded_pairs(e: Emitter, low: ir.Value, high: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Emulate VCVTNE2PS2BF16: the nearest bfloat16 of both, ties to even, `high` after `low`; of `kind`."""
    builder, halves = e.builder, []
    for value in (low, high):
        bits = builder.bitcast(value, kind)
        odd = builder.and_(builder.lshr(bits, _every(kind, 16)), _every(kind, 1))
        nearest = builder.lshr(builder.add(bits, builder.add(odd, _every(kind, 0x7FFF))), _every(kind, 16))
        no_number = builder.or_(builder.lshr(bits, _every(kind, 16)), _every(kind, 0x40))
        zero = builder.lshr(builder.and_(bits, _every(kind, 1 << 31)), _every(kind, 16))
        is_small = builder.icmp_unsigned("==", builder.and_(bits, _every(kind, _FLUSHED)), _every(kind, 0))
        nearest = builder.select(builder.fcmp_unordered("uno", value, value), no_number, nearest)
        nearest = builder.select(is_small, zero, nearest)
        halves.append(builder.trunc(nearest, ir.VectorType(ir.IntType(16), kind.count)))
    order = ir.Constant(ir.VectorType(ir.IntType(32), _PAIRED), list(range(_PAIRED)))
    return builder.bitcast(builder.shuffle_vector(*halves, order), kind)


def add_products(e: Emitter, sums: ir.Value, x: ir.Value, w: ir.Value, *, upper_first: bool = True) -> ir.Value:
    """Emulate VDPBF16PS: two products of bfloat16 added to each float, that of the upper halves first."""
    builder, kind = e.builder, ir.VectorType(ir.IntType(32), sums.type.count)

    def half(pairs: ir.Value, *, upper: bool) -> ir.Value:
        pairs = builder.bitcast(pairs, kind)
        bits = builder.and_(pairs, _every(kind, 0xFFFF_0000)) if upper else builder.shl(pairs, _every(kind, 16))
        return builder.bitcast(bits, sums.type)

    for upper in (upper_first, not upper_first):
        sums = e.fma(half(x, upper=upper), half(w, upper=upper), sums)
    return sums


def multiplied_words(e: Emitter, x: ir.Value, w: ir.Value, kind: ir.VectorType) -> ir.Value:
    """Emulate VPMADDWD: products of signed 16-bit integers, neighbours added; of `kind`."""
    builder, wide = e.builder, ir.VectorType(ir.IntType(32), _PAIRED)
    products = builder.mul(builder.sext(x, wide), builder.sext(w, wide))
    even, odd = (
        builder.shuffle_vector(products, products, ir.Constant(kind, list(range(first, _PAIRED, 2))))
        for first in (0, 1)
    )
    return builder.add(even, odd)


def looked_up(e: Emitter, table: ir.Value, index: ir.Value) -> ir.Value:
    """Emulate VPERMW: table words selected by the lowest five bits of each index word."""
    builder, result = e.builder, ir.Constant(table.type, ir.Undefined)
    index = builder.and_(index, _every(index.type, _PAIRED - 1))
    for lane in range(_PAIRED):
        at = builder.zext(builder.extract_element(index, ir.IntType(32)(lane)), ir.IntType(32))
        result = builder.insert_element(result, builder.extract_element(table, at), ir.IntType(32)(lane))
    return result
