"""Packing of rows for `dots.py`: as bfloat16, or as 16-bit integers in groups that share a scale."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from llvmlite import ir

from moiety_kernels.cpu.dots import BLOCKS, FOURS_AVAILABLE, PAIRS_AVAILABLE, WHOLE_AVAILABLE, narrowed
from moiety_kernels.cpu.emitter import I16, I32, I64, LANES, VF, VI32, Emitter, constant, function

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

_GREATEST = 32_767.0  # largest integer of a row: a group's products with eight bits stay far below 2³¹
_LEAST = 1e-30  # a group whose values are all smaller counts as zeros
_HALF_WORDS = ir.VectorType(I16, LANES)


def _pack_pairs(e: Emitter) -> None:
    """Emit out[i] = bfloat16(row[i]); arguments: row, count, out."""
    row, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        at = e.builder.mul(i, I64(4))
        pairs = narrowed(e, e.load(row, at), e.load(row, e.builder.add(at, I64(4 * LANES))))
        e.store(pairs, out, e.builder.mul(i, I64(2)))
        return []

    e.loop(count, 2 * LANES, [], body)


def _pack_fours(e: Emitter) -> None:
    """Emit out = bfloat16(row) in the order in which `dots.py` reads the inputs of a 4-bit weight.

    A byte of that weight holds two inputs that are 16 apart, and two blocks are read at once. Arguments: row, count,
    out.
    """
    row, count, out = e.function.args
    builder = e.builder

    def write(i: ir.Value, quarters: Sequence[int], to: int) -> None:
        low, high = (e.load(row, builder.mul(builder.add(i, I64(LANES * one)), I64(4))) for one in quarters)
        e.store(narrowed(e, low, high), out, builder.mul(builder.add(i, I64(to)), I64(2)))

    def both(i: ir.Value) -> list[ir.Value]:
        write(i, (0, 2), 0)
        write(i, (1, 3), 2 * LANES)
        return []

    def last(i: ir.Value) -> list[ir.Value]:
        write(builder.add(i, whole), (0, 1), 0)
        return []

    whole = builder.and_(count, I64(-BLOCKS))
    e.loop_if_any(whole, BLOCKS, [], both)
    e.loop_if_any(builder.sub(count, whole), 2 * LANES, [], last)


def _pack_whole(e: Emitter) -> None:
    """Emit the integers of a row's group and their scale: row[i] ≈ out[i] · scale.

    A NaN or infinite input makes the scale NaN or infinite. Arguments: row, count, out, scale.
    """
    row, count, out, scale_at = e.function.args
    builder = e.builder
    magnitude = ir.Constant(VI32, [0x7FFFFFFF] * LANES)

    def larger(a: ir.Value, b: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed(">", a, b), a, b)  # of a float's bits: NaN is the largest

    def body(i: ir.Value, top: ir.Value) -> list[ir.Value]:
        return [larger(builder.and_(builder.bitcast(e.load(row, builder.mul(i, I64(4))), VI32), magnitude), top)]

    (top,) = e.loop(count, LANES, [ir.Constant(VI32, [0] * LANES)], body)
    top = builder.bitcast(e.reduce(top, larger), VF)
    is_some = builder.fcmp_unordered(">=", top, constant(_LEAST))
    scale = builder.select(is_some, builder.fmul(top, constant(1.0 / _GREATEST)), constant(0.0))
    is_number = builder.and_(is_some, builder.fcmp_ordered("<", top, constant(math.inf)))
    inverse = builder.select(is_number, builder.fdiv(constant(_GREATEST), top), constant(0.0))
    e.store(builder.extract_element(scale, I32(0)), scale_at)

    def write(i: ir.Value) -> list[ir.Value]:
        value = builder.fmul(e.load(row, builder.mul(i, I64(4))), inverse)
        whole = builder.fptosi(e.intrinsic(f"llvm.rint.v{LANES}f32", VF, [VF], value), VI32)
        e.store(builder.trunc(whole, _HALF_WORDS), out, builder.mul(i, I64(2)))
        return []

    e.loop(count, LANES, [], write)


def _packing(name: str, num_arguments: int, emit: Callable[[Emitter], None], is_there: bool) -> Any:
    return function(f"moiety_pack_{name}", [I64] * num_arguments, emit if is_there else lambda _: None)


pack_pairs_row = _packing("pairs", 3, _pack_pairs, PAIRS_AVAILABLE)
pack_fours_row = _packing("fours", 3, _pack_fours, FOURS_AVAILABLE)
pack_whole_group = _packing("whole", 4, _pack_whole, WHOLE_AVAILABLE)
