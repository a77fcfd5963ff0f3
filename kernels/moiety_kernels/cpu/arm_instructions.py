"""Arm's products of bfloat16 (FEAT_BF16) and of 8-bit integers (FEAT_DotProd, FEAT_I8MM), on registers of 128 bits.

Each is an intrinsic of LLVM. Where its feature is emulated, a function in portable LLVM code takes its place, named
after it, so that `tests/kernels/arm_emulation.py` can put the intrinsic back. Emulated sums of bfloat16 are rounded to
nearest; the instruction rounds to odd (Arm Architecture Reference Manual, BFDOT).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from llvmlite import ir

from moiety_kernels.cpu.emitter import Emitter
from moiety_kernels.cpu.instructions import ARM_BYTES_FEATURE, ARM_PAIRS_FEATURE, EMULATED
from moiety_kernels.cpu.values import F32, I8, I16, I32, LANES, Vector

REGISTER_LANES = 4  # of 32 bits


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types
    """LLVM's type bfloat, which llvmlite lacks."""

    def _to_string(self) -> str:
        return "bfloat"


_FLOATS, _INTS = ir.VectorType(F32, REGISTER_LANES), ir.VectorType(I32, REGISTER_LANES)
_BYTES, _WIDE = ir.VectorType(I8, 4 * REGISTER_LANES), ir.VectorType(I32, 4 * REGISTER_LANES)
_HALF_PAIRS, _PAIRS = ir.VectorType(_BFloat(), REGISTER_LANES), ir.VectorType(_BFloat(), 2 * REGISTER_LANES)


class ArmInstruction(NamedTuple):
    """An instruction of an extension of Arm."""

    name: str
    feature: str
    result: ir.Type
    arguments: tuple[ir.Type, ...]
    native: Callable[..., Vector]  # takes the emitter and the arguments, and emits the intrinsic
    emulate: Callable[..., Vector]  # takes the arguments, and emits portable code

    def emit(self, e: Emitter, *arguments: Vector) -> Vector:
        """Emit the intrinsic, or a call of its emulation."""
        if self.feature not in EMULATED:
            return self.native(e, *arguments)
        name = f"moiety_arm_{self.name}"
        function = e.module.globals.get(name)
        if function is None:
            body = Emitter(e.module, name, self.arguments, self.result)
            function = body.function
            function.linkage = "linkonce_odr"  # so that no pass specializes its arguments
            body.builder.ret(self.emulate(*[Vector(body, argument) for argument in function.args]).ir)
        return Vector(e, e.builder.call(function, [argument.ir for argument in arguments]))


def _bfdot(e: Emitter, sums: Vector, x: Vector, w: Vector) -> Vector:
    arguments = sums.ir, x.as_(_PAIRS).ir, w.as_(_PAIRS).ir
    return Vector(
        e, e.intrinsic("llvm.aarch64.neon.bfdot.v4f32.v8bf16", _FLOATS, [_FLOATS, _PAIRS, _PAIRS], *arguments)
    )


def _bfcvt(e: Emitter, low: Vector, high: Vector) -> Vector:
    halves = [Vector(e, e.builder.fptrunc(floats.ir, _HALF_PAIRS)) for floats in (low, high)]
    return halves[0].shuffled(halves[1], range(2 * REGISTER_LANES)).as_(_INTS)


def _byte_dot(e: Emitter, sums: Vector, x: Vector, w: Vector, *, name: str) -> Vector:
    kinds = [_INTS, _BYTES, _BYTES]
    return Vector(e, e.intrinsic(f"llvm.aarch64.neon.{name}.v4i32.v16i8", _INTS, kinds, sums.ir, x.ir, w.ir))


def _add_pairs(sums: Vector, x: Vector, w: Vector) -> Vector:
    low, high = ((x << 16).as_(_FLOATS) * (w << 16).as_(_FLOATS), _upper(x) * _upper(w))
    return sums + (low + high)


def _upper(pairs: Vector) -> Vector:
    return (pairs & 0xFFFF_0000).as_(_FLOATS)


def _narrowed(low: Vector, high: Vector) -> Vector:
    halves = []
    for value in (low, high):
        bits = value.as_(_INTS)
        nearest = (bits + (((bits >> 16) & 1) + 0x7FFF)) >> 16
        nearest = value.is_nan().choose((bits >> 16) | 0x40, nearest)
        halves.append(nearest.truncated(ir.VectorType(I16, REGISTER_LANES)))
    return halves[0].shuffled(halves[1], range(2 * REGISTER_LANES)).as_(_INTS)


def _add_bytes(sums: Vector, x: Vector, w: Vector, *, signed: bool) -> Vector:
    products = x.extended(_WIDE, signed=signed) * w.extended(_WIDE, signed=True)
    for first in range(4):
        sums = sums + products.lanes(range(first, 4 * REGISTER_LANES, 4))
    return sums


_OF_BYTES = (_INTS, _BYTES, _BYTES)
BFDOT = ArmInstruction(  # adds two products of bfloat16 to each float
    "bfdot", ARM_PAIRS_FEATURE, _FLOATS, (_FLOATS, _INTS, _INTS), _bfdot, _add_pairs
)
BFCVT = ArmInstruction(  # the nearest bfloat16 of the floats of two registers
    "bfcvt", ARM_PAIRS_FEATURE, _INTS, (_FLOATS, _FLOATS), _bfcvt, _narrowed
)
SDOT = ArmInstruction(  # adds four products of signed bytes to each int32
    "sdot", ARM_BYTES_FEATURE, _INTS, _OF_BYTES, partial(_byte_dot, name="sdot"), partial(_add_bytes, signed=True)
)
USDOT = ArmInstruction(  # the same for unsigned bytes with signed ones
    "usdot", ARM_BYTES_FEATURE, _INTS, _OF_BYTES, partial(_byte_dot, name="usdot"), partial(_add_bytes, signed=False)
)
ARM_INSTRUCTIONS = (BFDOT, BFCVT, SDOT, USDOT)


def _halves(vector: Vector) -> tuple[Vector, Vector]:
    return vector.lanes(range(REGISTER_LANES)), vector.lanes(range(REGISTER_LANES, LANES))


def _joined(low: Vector, high: Vector) -> Vector:
    return low.shuffled(high, range(LANES))


def arm_narrowed(e: Emitter, low: Vector, high: Vector) -> Vector:
    """Round 2 · LANES floats to the nearest bfloat16, ties to even, as LANES pairs (BF16)."""
    return _joined(*[BFCVT.emit(e, *_halves(floats)) for floats in (low, high)])


def arm_add_pairs(e: Emitter, sums: Vector, x: Vector, w: Vector) -> Vector:
    """Add two products of bfloat16 to the float in each of LANES lanes (BF16)."""
    return _joined(*[BFDOT.emit(e, *parts) for parts in zip(_halves(sums), _halves(x), _halves(w), strict=True)])


def arm_add_bytes(e: Emitter, sums: Vector, x: Vector, w: Vector) -> Vector:
    """Add the products of 16 integers of 16 bits with 16 of 8 bits (DotProd and I8MM).

    `x`: the upper bytes of the 16 integers, signed, then their lower bytes. The first four lanes of the sums are those
    of the upper bytes, to be multiplied by 256, and the others those of the lower bytes.
    """
    upper, lower = _halves(sums)
    num_bytes = _BYTES.count
    upper = SDOT.emit(e, upper, x.lanes(range(num_bytes)), w)
    return _joined(upper, USDOT.emit(e, lower, x.lanes(range(num_bytes, 2 * num_bytes)), w))


UPPER_FACTORS = [256.0] * REGISTER_LANES + [1.0] * REGISTER_LANES  # of the lanes of `arm_add_bytes`
