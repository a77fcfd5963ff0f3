"""Unpacking of quantized weight rows to bfloat16, one chunk per task, sized for the core's cache.

So memory traffic is only the quantized size. N weight rows, K width, G groups of inputs that share a scale.
"""

from __future__ import annotations

import functools
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

from moiety_kernels.cpu.compiling import jit
from moiety_kernels.cpu.dots import PAIRS_AVAILABLE, narrowed
from moiety_kernels.cpu.emitter import Emitter, function
from moiety_kernels.cpu.structs import Address, Int64
from moiety_kernels.cpu.values import LANES, VF, VI16, VI32, Bytes, Floats, Int, Pairs, Vector
from moiety_kernels.quantization.weight import BLOCK, QuantizedWeight, WeightFormat

if TYPE_CHECKING:
    from torch import Tensor

# number formats of a weight
PLAIN, INT4, INT8, E2M1, E4M3, INT4_OFFSETS, E2M1_HALVES = range(7)  # PLAIN: not quantized
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
    numbers, shift = number_format(weight.format)
    return WeightArguments(
        values=weight.values_NK.data_ptr(), scales=weight.scales_NG.data_ptr(), numbers=numbers, shift=shift
    )


@functools.cache
def number_format(form: WeightFormat) -> tuple[int, int]:
    """Return the number format of quantized weights, and the shift from an input to its scale."""
    shift = WHOLE_ROW if form.group is None else form.group.bit_length() - 1
    fours = INT4_OFFSETS if form.offsets else INT4
    floats = E4M3 if form.bits == 8 else E2M1_HALVES if form.in_halves else E2M1
    return floats if form.floating else (fours if form.bits == 4 else INT8), shift


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


def _bfloat16(e: Emitter, low: Vector, high: Vector) -> tuple[Vector, ...]:
    """Round 2 · LANES floats to the nearest bfloat16, ties to even: as one vector of pairs, or as two."""
    if PAIRS_AVAILABLE:
        return (narrowed(e, low, high),)
    halves = []
    for value in (low, high):
        bits = value.as_(VI32)
        odd = (bits >> 16) & 1
        halves.append((((bits + odd) + 0x7FFF) >> 16).truncated(VI16))
    return tuple(halves)


def _from_floating(e: Emitter, wide: Vector, kind: int) -> Vector:
    """Return floats from floating-point numbers in the low bits of VI32.

    The sign comes first, then exponent and significand, which are moved to a float's bit positions; then the difference
    of the biases is added. Subnormal numbers are integer multiples of the smallest; made by shifting, they would be
    floats too small to represent.
    """
    bits, significand_bits, bias = (8, 3, 7) if kind == E4M3 else (4, 1, 1)
    magnitude = wide & ((1 << bits - 1) - 1)
    normal = ((magnitude << (23 - significand_bits)) + (127 - bias << 23)).as_(VF)
    small = magnitude.to_floats() * 2.0 ** (1 - bias - significand_bits)
    is_small = magnitude < 1 << significand_bits
    value = is_small.choose(small, normal).as_(VI32)
    sign = (wide >> (bits - 1)) << 31
    return (value | sign).as_(VF)


def _widen(e: Emitter, q_K: Bytes, k: Int, scales_G: Floats, shift: Int, out_K: Pairs, *, kind: int) -> None:
    """Emit out[i] = bfloat16(q[i] · scale of i), plus the offset of i if there are any, for BLOCK numbers at a time."""
    offsets = int(kind == INT4_OFFSETS)

    def numbers(wide: Vector) -> Vector:
        if kind in (E2M1, E4M3, E2M1_HALVES):
            return _from_floating(e, wide, kind)
        return (wide if kind == INT8 else wide - 8).to_floats()

    for i in e.loop(k, BLOCK):
        group = (i >> shift) << offsets
        scale = e.splat(scales_G.scalar(group))
        scales = [scale, e.splat(scales_G.scalar(group + 1)) if kind == E2M1_HALVES else scale]
        if kind in (INT8, E4M3):
            wide = [q_K[i + n].extended(VI32, signed=kind == INT8) for n in range(0, BLOCK, LANES)]
        else:
            start = i >> 1
            both = [q_K[start + n].extended(VI32, signed=False) for n in range(0, BLOCK // 2, LANES)]
            wide = [pair & 15 for pair in both] + [pair >> 4 for pair in both]
        floats = [numbers(one) * scales[2 * part // len(wide)] for part, one in enumerate(wide)]
        if offsets:
            offset = e.splat(scales_G.scalar(group + 1))
            floats = [one + offset for one in floats]
        for pair in range(0, len(floats), 2):
            parts = _bfloat16(e, floats[pair], floats[pair + 1])
            for number, part in enumerate(parts):
                out_K[i + LANES * (pair + number)] = part


_KINDS = {"int4": INT4, "int8": INT8, "e2m1": E2M1, "e4m3": E4M3, "int4_offsets": INT4_OFFSETS}
_KINDS["e2m1_halves"] = E2M1_HALVES
_widen_int4, _widen_int8, _widen_e2m1, _widen_e4m3, _widen_int4_offsets, _widen_e2m1_halves = (
    function(f"moiety_widen_{name}", partial(_widen, kind=kind)) for name, kind in _KINDS.items()
)


@jit
def unpack_rows(weight: WeightArguments, first: int, num_rows: int, k: int, out: int) -> None:
    """Write `num_rows` rows of k inputs from row `first` on to `out`, as bfloat16."""
    values, scales, kind, shift = weight.values, weight.scales, weight.numbers, weight.shift
    row_bytes = k if kind in (INT8, E4M3) else k // 2
    scales_bytes = 4 * (((k - 1) >> shift) + 1) << int(kind == INT4_OFFSETS)
    for row in range(num_rows):
        at, target = values + (first + row) * row_bytes, out + 2 * row * k
        scale = scales + (first + row) * scales_bytes
        if kind == INT8:
            _widen_int8(at, k, scale, shift, target)
        elif kind == INT4:
            _widen_int4(at, k, scale, shift, target)
        elif kind == INT4_OFFSETS:
            _widen_int4_offsets(at, k, scale, shift, target)
        elif kind == E4M3:
            _widen_e4m3(at, k, scale, shift, target)
        elif kind == E2M1_HALVES:
            _widen_e2m1_halves(at, k, scale, shift, target)
        else:
            _widen_e2m1(at, k, scale, shift, target)
