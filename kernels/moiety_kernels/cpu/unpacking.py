"""Unpacking of quantized weight rows to bfloat16, one chunk per task, sized for the core's cache.

So memory traffic is only the quantized size.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from llvmlite import ir

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.dots import PAIRS_AVAILABLE, narrowed
from moiety_kernels.cpu.emitter import I8, I64, LANES, VF, VI16, VI32, Emitter, constant, function
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.quantization.weight import BLOCK, QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

# number formats of a weight
PLAIN, INT4, INT8, E2M1, E4M3 = range(5)  # PLAIN: not quantized
WHOLE_ROW = 62  # the shift by which a whole row is one group
UNPACKED_BYTES = 2 << 20
MAX_UNPACKED_WIDTH = UNPACKED_BYTES // (2 * 2 * 16)  # of a weight of which 16 rows of gate and up are unpacked at once


class WeightArguments(NamedTuple):
    """A weight as kernels read it."""

    values: Address
    scales: Address  # float32, or 0
    numbers: Int64  # the number format
    shift: Int64  # from an input to its scale


def weight_arguments(weight: Tensor | QuantizedWeight) -> WeightArguments:
    """Return the weight as kernels read it."""
    if not isinstance(weight, QuantizedWeight):
        return WeightArguments(values=weight.data_ptr(), scales=0, numbers=PLAIN, shift=0)
    form = weight.format
    shift = WHOLE_ROW if form.group is None else form.group.bit_length() - 1
    numbers = (E2M1 if form.bits == 4 else E4M3) if form.floating else (INT4 if form.bits == 4 else INT8)
    return WeightArguments(
        values=weight.values_NK.data_ptr(), scales=weight.scales_NG.data_ptr(), numbers=numbers, shift=shift
    )


def is_unpackable(weight: QuantizedWeight) -> bool:
    """Return whether the kernels here support the weight."""
    return (
        weight.is_contiguous()
        and weight.format.pack == BLOCK
        and weight.format.is_kept
        and weight.format.takes(weight.shape[-1])
        and weight.shape[-1] <= MAX_UNPACKED_WIDTH
        and weight.device_type == "cpu"
    )


def _bfloat16(e: Emitter, low: ir.Value, high: ir.Value) -> tuple[ir.Value, ...]:
    """Round 2 · LANES floats to the nearest bfloat16, ties to even: as one vector of pairs, or as two."""
    if PAIRS_AVAILABLE:
        return (narrowed(e, low, high),)
    halves = []
    for value in (low, high):
        bits = e.builder.bitcast(value, VI32)
        sixteen, one = ir.Constant(VI32, [16] * LANES), ir.Constant(VI32, [1] * LANES)
        odd = e.builder.and_(e.builder.lshr(bits, sixteen), one)
        rounded = e.builder.add(e.builder.add(bits, odd), ir.Constant(VI32, [0x7FFF] * LANES))
        halves.append(e.builder.trunc(e.builder.lshr(rounded, sixteen), VI16))
    return tuple(halves)


def _from_floating(e: Emitter, wide: ir.Value, kind: int) -> ir.Value:
    """Return floats from floating-point numbers in the low bits of VI32.

    The sign comes first, then exponent and significand, which are moved to a float's bit positions; then the difference
    of the biases is added. Subnormal numbers are integer multiples of the smallest; made by shifting, they would be
    floats too small to represent.
    """
    bits, significand_bits, bias = (8, 3, 7) if kind == E4M3 else (4, 1, 1)
    builder = e.builder

    def every(value: int) -> ir.Constant:
        return ir.Constant(VI32, [value] * LANES)

    magnitude = builder.and_(wide, every((1 << bits - 1) - 1))
    shifted = builder.shl(magnitude, every(23 - significand_bits))
    normal = builder.bitcast(builder.add(shifted, every(127 - bias << 23)), VF)
    least = constant(2.0 ** (1 - bias - significand_bits))
    small = builder.fmul(builder.sitofp(magnitude, VF), least)
    is_small = builder.icmp_signed("<", magnitude, every(1 << significand_bits))
    value = builder.bitcast(builder.select(is_small, small, normal), VI32)
    sign = builder.shl(builder.lshr(wide, every(bits - 1)), every(31))
    return builder.bitcast(builder.or_(value, sign), VF)


def _widen(e: Emitter, kind: int) -> None:
    """Emit out[i] = bfloat16(q[i] · scale of i); arguments: q, count, scales, shift, out."""
    q, count, scales, shift, out = e.function.args
    builder = e.builder
    bytes_kind = ir.VectorType(I8, LANES)

    def numbers(address: ir.Value) -> ir.Value:
        return builder.load(e.pointer(address), typ=bytes_kind, align=1)

    def write(values: list[ir.Value], scale: ir.Value, at: ir.Value) -> None:
        floats = [builder.fmul(value, scale) for value in values]
        for pair, offset in zip(range(0, len(floats), 2), range(0, 4 * LANES * len(floats), 4 * LANES), strict=False):
            parts = _bfloat16(e, floats[pair], floats[pair + 1])
            size = 4 * LANES // len(parts)
            for number, part in enumerate(parts):
                builder.store(part, e.pointer(at, offset + size * number), align=2)

    def body(i: ir.Value) -> list[ir.Value]:
        group = builder.lshr(i, shift)
        scale = e.splat(e.load_scalar(scales, builder.mul(group, I64(4))))
        at = builder.add(out, builder.mul(i, I64(2)))
        if kind in (INT8, E4M3):
            vectors = [numbers(builder.add(q, builder.add(i, I64(n)))) for n in range(0, BLOCK, LANES)]
            if kind == INT8:
                write([builder.sitofp(builder.sext(vector, VI32), VF) for vector in vectors], scale, at)
            else:
                write([_from_floating(e, builder.zext(vector, VI32), kind) for vector in vectors], scale, at)
            return []
        start = builder.add(q, builder.lshr(i, I64(1)))
        wide = [builder.zext(numbers(builder.add(start, I64(n))), VI32) for n in range(0, BLOCK // 2, LANES)]
        fifteen, four, eight = (ir.Constant(VI32, [n] * LANES) for n in (15, 4, 8))
        halves = [builder.and_(value, fifteen) for value in wide] + [builder.lshr(value, four) for value in wide]
        if kind == INT4:
            write([builder.sitofp(builder.sub(half, eight), VF) for half in halves], scale, at)
        else:
            write([_from_floating(e, half, kind) for half in halves], scale, at)
        return []

    e.loop(count, BLOCK, [], body)


_widen_int4, _widen_int8, _widen_e2m1, _widen_e4m3 = (
    function(f"moiety_widen_{name}", [I64] * 5, partial(_widen, kind=kind))
    for name, kind in (("int4", INT4), ("int8", INT8), ("e2m1", E2M1), ("e4m3", E4M3))
)


@jit
def unpack_rows(weight: WeightArguments, first: int, num_rows: int, k: int, out: int) -> None:
    """Write `num_rows` rows of k inputs from row `first` on to `out`, as bfloat16."""
    values, scales, kind, shift = weight.values, weight.scales, weight.numbers, weight.shift
    row_bytes = k if kind in (INT8, E4M3) else k // 2
    groups = ((k - 1) >> shift) + 1
    for row in range(num_rows):
        at, target = values + (first + row) * row_bytes, out + 2 * row * k
        scale = scales + 4 * (first + row) * groups
        if kind == INT8:
            _widen_int8(at, k, scale, shift, target)
        elif kind == INT4:
            _widen_int4(at, k, scale, shift, target)
        elif kind == E4M3:
            _widen_e4m3(at, k, scale, shift, target)
        else:
            _widen_e2m1(at, k, scale, shift, target)
