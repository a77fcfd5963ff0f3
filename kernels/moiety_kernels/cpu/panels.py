"""Attention's products in pairs of bfloat16 (AVX512-BF16): queries with keys, and weights with values.

Keys and values of any type are packed first, so that no sum runs over the lanes of a register.

A panel holds 16 keys: for each pair of their entries, 16 adjacent lanes. One query's pair times a panel's pairs adds to
16 scores at once, and a score is summed over a key's entries in order. Values are packed two positions at a time, entry
by entry, so one row's pair of weights adds to 16 entries at once. The sums of each row are made in the same steps
whatever the number of rows.

All addresses and strides are bytes. Widths are multiples of DEPTH.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from llvmlite import ir

from moiety_kernels.cpu.dots import PAIRS_AVAILABLE, add_pairs, narrowed
from moiety_kernels.cpu.emitter import (
    F32,
    I16,
    I32,
    I64,
    LANES,
    VF,
    VI16,
    VI32,
    VOID,
    Emitter,
    call_by_rows,
    constant,
    emit_once,
    function,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

DEPTH = 2 * LANES  # entries packed at once
PANEL = LANES  # keys
TOGETHER = 2  # panels, or vectors of a value, that a tile multiplies
MOST_ROWS = 6  # rows of a tile
_UNROLLED = 4  # pairs per loop iteration

_PAIR_BYTES = 4 * LANES * TOGETHER  # bytes of a tile's operand for one pair of each row
_LEAST_POWER = -127.0  # power of two below every float but zero
# coefficients of (2^x - 1) / x for |x| ≤ ½, from the lowest power on; 2^x is then right to 2e-7 of its value
_POWERS = (0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647203)


def _load_narrow(e: Emitter, address: ir.Value, at: ir.Value) -> ir.Value:
    return e.builder.load(e.pointer(address, at), typ=VI16, align=2)


def _pack_keys(e: Emitter, narrow: bool) -> None:
    """Emit panel[pair of entries][16] of 16 keys, pairs TOGETHER panels apart. `narrow`: the keys are bfloat16.

    Arguments: key addresses, their width, panel.
    """
    pointers, width, panel = e.function.args
    builder = e.builder
    starts = [builder.load(e.pointer(pointers, 8 * key), typ=I64, align=8) for key in range(PANEL)]

    def body(i: ir.Value) -> list[ir.Value]:
        at = builder.mul(i, I64(2 if narrow else 4))
        if narrow:
            rows = [builder.load(e.pointer(start, at), typ=VI32, align=2) for start in starts]
        else:
            after = builder.add(at, I64(4 * LANES))
            rows = [narrowed(e, e.load(start, at), e.load(start, after)) for start in starts]
        target = builder.mul(builder.lshr(i, I64(1)), I64(_PAIR_BYTES))
        for pair, vector in enumerate(e.transposed(rows)):
            e.store(vector, panel, builder.add(target, I64(_PAIR_BYTES * pair)))
        return []

    e.loop(width, DEPTH, [], body)


def _pack_values(e: Emitter, narrow: bool) -> None:
    """Emit out[entry][2] of two values; arguments: their addresses, their width, out."""
    first, second, width, out = e.function.args
    builder = e.builder
    mixed = ir.Constant(ir.VectorType(I32, DEPTH), [lane // 2 + LANES * (lane % 2) for lane in range(DEPTH)])

    def body(i: ir.Value) -> list[ir.Value]:
        at = builder.mul(i, I64(2 if narrow else 4))
        if narrow:
            pairs = builder.shuffle_vector(_load_narrow(e, first, at), _load_narrow(e, second, at), mixed)
        else:
            both = builder.bitcast(narrowed(e, e.load(first, at), e.load(second, at)), ir.VectorType(I16, DEPTH))
            pairs = builder.shuffle_vector(both, both, mixed)
        e.store(pairs, out, builder.mul(i, I64(4)))
        return []

    e.loop(width, LANES, [], body)


class _Tile:
    """Sums over pairs, for `rows` rows times TOGETHER vectors."""

    def __init__(self, e: Emitter, rows: int, left: ir.Value, left_stride: ir.Value) -> None:
        self.e, self.rows = e, rows
        self.starts = [e.builder.add(left, e.builder.mul(left_stride, I64(row))) for row in range(rows)]

    def added(self, sums: list[ir.Value], right: ir.Value, apart: ir.Value, pairs: ir.Value) -> list[ir.Value]:
        """Add `pairs` pairs from the rows' start on; the pairs of `right` are `apart` bytes apart."""
        e, builder = self.e, self.e.builder

        def body(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
            current = list(sums)
            for more in range(_UNROLLED):
                pair = builder.add(i, I64(more))
                at = builder.mul(pair, apart)
                vectors = [e.load(right, builder.add(at, I64(4 * LANES * n))) for n in range(TOGETHER)]
                for m, start in enumerate(self.starts):
                    one = e.splat(e.load_scalar(start, builder.mul(pair, I64(4))))
                    for n, vector in enumerate(vectors):
                        current[TOGETHER * m + n] = add_pairs(e, current[TOGETHER * m + n], one, vector)
            return current

        return e.loop(pairs, _UNROLLED, sums, body)


def _scores(e: Emitter, rows: int) -> None:
    """Emit scores[m, key] = query_m · key, TOGETHER panels at a time.

    Arguments: packed queries, their stride, their pairs, panels, number of keys, scores, their stride.
    """
    queries, stride, pairs, panels, keys, out, out_stride = e.function.args
    builder = e.builder
    tile = _Tile(e, rows, queries, stride)
    apart = I64(_PAIR_BYTES)

    def body(key: ir.Value) -> list[ir.Value]:
        panel = builder.add(panels, builder.mul(builder.mul(key, pairs), I64(4)))
        sums = tile.added([constant(0.0)] * (rows * TOGETHER), panel, apart, pairs)
        for m in range(rows):
            at = builder.add(builder.mul(out_stride, I64(m)), builder.mul(key, I64(4)))
            for n in range(TOGETHER):
                e.store(sums[TOGETHER * m + n], out, builder.add(at, I64(4 * LANES * n)))
        return []

    e.loop(keys, TOGETHER * PANEL, [], body)


def _weighted(e: Emitter, rows: int) -> None:
    """Emit out[m, :] = out[m, :] · factor_m + Σ_j weight[m, j] · value_j, TOGETHER vectors of the values at a time.

    Arguments: weights in bfloat16, their stride, pairs of them, packed values, their width, factors, out.
    """
    weights, stride, pairs, values, width, factors, out = e.function.args
    builder = e.builder
    tile = _Tile(e, rows, weights, stride)
    each = [e.splat(e.load_scalar(factors, 4 * m)) for m in range(rows)]
    apart = builder.mul(width, I64(4))

    def body(entry: ir.Value) -> list[ir.Value]:
        at = [
            builder.add(builder.mul(apart, I64(m)), builder.mul(builder.add(entry, I64(LANES * n)), I64(4)))
            for m in range(rows)
            for n in range(TOGETHER)
        ]
        before = [builder.fmul(e.load(out, one), each[number // TOGETHER]) for number, one in enumerate(at)]
        sums = tile.added(before, builder.add(values, builder.mul(entry, I64(4))), apart, pairs)
        for one, total in zip(at, sums, strict=True):
            e.store(total, out, one)
        return []

    e.loop(width, LANES * TOGETHER, [], body)


def _power(e: Emitter, x: ir.Value) -> ir.Value:
    """Return 2^x for x of at most a few ten-thousandths above 0; exactly 0 below -127 (-inf included)."""
    builder = e.builder
    least = constant(_LEAST_POWER)
    x = builder.select(builder.fcmp_unordered(">", x, least), x, least)
    turning = constant(1.5 * 2**23)  # adding it rounds to the nearest integer, which is then in the lowest bits
    turned = builder.fadd(x, turning)
    rest = builder.fsub(x, builder.fsub(turned, turning))
    poly = constant(_POWERS[-1])
    for factor in (*reversed(_POWERS[:-1]), 1.0):
        poly = e.fma(poly, rest, constant(factor))
    whole = builder.shl(builder.bitcast(turned, VI32), ir.Constant(VI32, [23] * LANES))
    return builder.bitcast(builder.add(builder.bitcast(poly, VI32), whole), VF)


def _weigh(e: Emitter, masked: bool) -> None:
    """Emit one step of the online softmax, with powers of two, over a row of scores.

    Arguments: scores, their number (a multiple of DEPTH), the first visible position and the first one after it that is
    not visible, the factor of scores, state, the weights in bfloat16, the address for the factor that shrinks earlier
    sums.

    `state` holds the largest score so far, scaled, and the sum of weights as two floats.
    """
    scores, count, first, end, factor, state, weights, shrink_at = e.function.args
    builder = e.builder
    lowest, lanes = constant(-math.inf), ir.Constant(VI32, list(range(LANES)))

    def every(whole: ir.Value) -> ir.Value:
        one = builder.insert_element(ir.Constant(VI32, ir.Undefined), builder.trunc(whole, I32), I32(0))
        return builder.shuffle_vector(one, one, ir.Constant(VI32, [0] * LANES))

    def seen(i: ir.Value) -> ir.Value:
        value = e.load(scores, builder.mul(i, I64(4)))
        if not masked:
            return value
        at = builder.add(lanes, every(i))
        inside = builder.and_(builder.icmp_signed(">=", at, every(first)), builder.icmp_signed("<", at, every(end)))
        return builder.select(inside, value, lowest)

    def top(i: ir.Value, *tops: ir.Value) -> list[ir.Value]:
        return [e.larger(seen(builder.add(i, I64(LANES * n))), one) for n, one in enumerate(tops)]

    largest = e.larger(*e.loop(count, DEPTH, [lowest, lowest], top))
    before = e.splat(e.load_scalar(state))
    factors = e.splat(factor)
    reduced = builder.fmul(e.reduce(largest, e.larger), factors)
    largest = e.larger(reduced, before)
    hidden = builder.fcmp_ordered("==", largest, lowest)  # nothing seen yet: -inf minus -inf is NaN
    base = builder.select(hidden, constant(0.0), largest)
    minus = builder.fsub(constant(0.0), base)

    def body(i: ir.Value, *totals: ir.Value) -> list[ir.Value]:
        powers = [_power(e, e.fma(seen(builder.add(i, I64(LANES * n))), factors, minus)) for n in range(2)]
        e.store(narrowed(e, *powers), weights, builder.mul(i, I64(2)))
        return [builder.fadd(total, power) for total, power in zip(totals, powers, strict=True)]

    totals = e.loop(count, DEPTH, [constant(0.0)] * 2, body)
    total = builder.extract_element(e.reduce(builder.fadd(*totals), builder.fadd), I32(0))
    shrink = builder.extract_element(_power(e, builder.fsub(before, base)), I32(0))
    e.store(builder.extract_element(largest, I32(0)), state)
    e.store(builder.fadd(builder.fmul(e.load_scalar(state, 4), shrink), total), state, 4)
    e.store(shrink, shrink_at)


def _by_rows(name: str, num_arguments: int, emit: Callable[..., None]) -> Any:
    """Return the function (rows, …) that calls the code for that number of rows, 1 to MOST_ROWS."""
    kinds = [I64] * num_arguments

    def choose(e: Emitter) -> None:
        def one(rows: int) -> ir.Function:
            return emit_once(e.module, f"moiety_{name}_{rows}", kinds, partial(emit, rows=rows), VOID)

        call_by_rows(e, MOST_ROWS, one)

    return _function(name, [I64, *kinds], choose)


def _function(name: str, kinds: list[ir.Type], emit: Callable[[Emitter], None]) -> Any:
    """Return the function, empty where the CPU lacks these instructions; it is never called there."""
    return function(f"moiety_panels_{name}", kinds, emit if PAIRS_AVAILABLE else lambda _: None)


pack_keys, pack_narrow_keys = (
    _function(f"pack_keys_{narrow}", [I64] * 3, partial(_pack_keys, narrow=narrow)) for narrow in (False, True)
)
pack_values, pack_narrow_values = (
    _function(f"pack_values_{narrow}", [I64] * 4, partial(_pack_values, narrow=narrow)) for narrow in (False, True)
)
_weigh_kinds = [I64, I64, I64, I64, F32, I64, I64, I64]
weigh_scores, weigh_masked_scores = (
    _function(f"weigh_{masked}", _weigh_kinds, partial(_weigh, masked=masked)) for masked in (False, True)
)
score_rows = _by_rows("scores", 7, _scores)
add_weighted_values = _by_rows("weighted", 7, _weighted)
