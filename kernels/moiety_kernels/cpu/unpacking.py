"""Rows of a weight in few bits widened to bfloat16, a task's chunk of them at a time, so that they stay in its core's
cache: what is read from memory is as small as it is kept."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from llvmlite import ir

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.emitter import I8, I64, LANES, VF, VI16, VI32, Emitter, function
from moiety_kernels.cpu.tiles import IN_HARDWARE, narrowed
from moiety_kernels.quantization.weight import BLOCK, QuantizedWeight

if TYPE_CHECKING:
    from torch import Tensor

PLAIN = 0  # the format of a weight that is not in few bits
WHOLE_ROW = 62  # the shift by which all of a row is one group
UNPACKED_BYTES = 2 << 20
MAX_UNPACKED_WIDTH = UNPACKED_BYTES // (2 * 2 * 16)  # of a weight of which 16 rows of gate and up are unpacked at once


def format_of(weight: Tensor | QuantizedWeight) -> tuple[int, int, int, int]:
    """(address, address of the scales, bits or PLAIN, shift from an input to its scale), as `chunk_of` wants them."""
    if not isinstance(weight, QuantizedWeight):
        return weight.data_ptr(), 0, PLAIN, 0
    group = weight.format.group
    shift = WHOLE_ROW if group is None else group.bit_length() - 1
    return weight.values_NK.data_ptr(), weight.scales_NG.data_ptr(), weight.format.bits, shift


def is_unpackable(weight: QuantizedWeight) -> bool:
    """Whether the kernels here take the weight."""
    group = weight.format.group
    return (
        weight.is_contiguous()
        and weight.format.pack == BLOCK
        and not weight.format.floating
        and weight.shape[-1] <= MAX_UNPACKED_WIDTH
        and weight.device_type == "cpu"
        and (group is None or group & (group - 1) == 0)
    )


def _bfloat16(e: Emitter, low: ir.Value, high: ir.Value) -> tuple[ir.Value, ...]:
    """2 · LANES floats to the nearest bfloat16, ties to even: as one vector of pairs, or as two."""
    if IN_HARDWARE:
        return (narrowed(e, low, high),)
    halves = []
    for value in (low, high):
        bits = e.builder.bitcast(value, VI32)
        sixteen, one = ir.Constant(VI32, [16] * LANES), ir.Constant(VI32, [1] * LANES)
        odd = e.builder.and_(e.builder.lshr(bits, sixteen), one)
        rounded = e.builder.add(e.builder.add(bits, odd), ir.Constant(VI32, [0x7FFF] * LANES))
        halves.append(e.builder.trunc(e.builder.lshr(rounded, sixteen), VI16))
    return tuple(halves)


def _widen(e: Emitter, bits: int) -> None:
    """out[i] = bfloat16(q[i] · scale of i); arguments: q, count, scales, shift, out."""
    q, count, scales, shift, out = e.function.args
    builder = e.builder
    bytes_kind = ir.VectorType(I8, LANES)

    def numbers(address: ir.Value) -> ir.Value:
        return builder.load(e.pointer(address), typ=bytes_kind, align=1)

    def write(values: list[ir.Value], scale: ir.Value, at: ir.Value) -> None:
        floats = [builder.fmul(builder.sitofp(value, VF), scale) for value in values]
        for pair, offset in zip(range(0, len(floats), 2), range(0, 4 * LANES * len(floats), 4 * LANES), strict=False):
            parts = _bfloat16(e, floats[pair], floats[pair + 1])
            size = 4 * LANES // len(parts)
            for number, part in enumerate(parts):
                builder.store(part, e.pointer(at, offset + size * number), align=2)

    def body(i: ir.Value) -> list[ir.Value]:
        group = builder.lshr(i, shift)
        scale = e.splat(e.load_scalar(scales, builder.mul(group, I64(4))))
        at = builder.add(out, builder.mul(i, I64(2)))
        if bits == 8:
            vectors = [numbers(builder.add(q, builder.add(i, I64(n)))) for n in range(0, BLOCK, LANES)]
            write([builder.sext(vector, VI32) for vector in vectors], scale, at)
            return []
        start = builder.add(q, builder.lshr(i, I64(1)))
        wide = [builder.zext(numbers(builder.add(start, I64(n))), VI32) for n in range(0, BLOCK // 2, LANES)]
        fifteen, four, eight = (ir.Constant(VI32, [n] * LANES) for n in (15, 4, 8))
        lower = [builder.sub(builder.and_(value, fifteen), eight) for value in wide]
        upper = [builder.sub(builder.lshr(value, four), eight) for value in wide]
        write(lower + upper, scale, at)
        return []

    e.loop(count, BLOCK, [], body)


_widen_8, _widen_4 = (function(f"moiety_widen_int{bits}", [I64] * 5, partial(_widen, bits=bits)) for bits in (8, 4))


@jit
def unpack_rows(values: int, scales: int, bits: int, shift: int, first: int, num_rows: int, k: int, out: int) -> None:
    """`num_rows` rows of k inputs from row `first` on, as bfloat16."""
    row_bytes = k * bits // 8
    groups = max(1, k >> shift)
    for row in range(num_rows):
        at = values + (first + row) * row_bytes
        scale = scales + 4 * (first + row) * groups
        if bits == 8:
            _widen_8(at, k, scale, shift, out + 2 * row * k)
        else:
            _widen_4(at, k, scale, shift, out + 2 * row * k)
