"""Attention's products in pairs of bfloat16 (AVX512-BF16): queries with keys, and weights with values.

Keys and values of any type are packed first, so that no sum runs over the lanes of a register.

A panel holds 16 keys: for each pair of their entries, 16 adjacent lanes. One query's pair times a panel's pairs adds to
16 scores at once, and a score is summed over a key's entries in order. Values are packed two positions at a time, entry
by entry, so one row's pair of weights adds to 16 entries at once. The sums of each row are made in the same steps
whatever the number of rows.

M rows, K width of keys, J positions, D width of values, N vectors of a tile. All strides are bytes. Widths are
multiples of DEPTH.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from moiety_kernels.cpu.dots import PAIRS_AVAILABLE, add_pairs, narrowed
from moiety_kernels.cpu.emitter import Emitter, call_by_rows, emit_once, function
from moiety_kernels.cpu.values import (
    I16,
    LANES,
    VF,
    VI32,
    Addresses,
    Bytes,
    Float,
    Floats,
    Int,
    Int16s,
    Pairs,
    Vector,
)

DEPTH = 2 * LANES  # entries packed at once
PANEL = LANES  # keys
TOGETHER = 2  # panels, or vectors of a value, that a tile multiplies
MAX_ROWS = 6  # rows of a tile
_UNROLLED = 4  # pairs per loop iteration

_PAIR_BYTES = 4 * LANES * TOGETHER  # bytes of a tile's operand for one pair of each row
_MIN_POWER = -127.0  # power of two below every float but zero
# coefficients of (2^x - 1) / x for |x| ≤ ½, from the lowest power on; 2^x is then right to 2e-7 of its value
_POWERS = (0.693147004, 0.240222424, 0.0555073358, 0.00967151299, 0.00132647203)


def _pack_keys(e: Emitter, keys: Addresses, width: Int, panel: Pairs, *, narrow: bool) -> None:
    """Emit panel[pair of entries][16] of 16 keys, pairs TOGETHER panels apart. `narrow`: the keys are bfloat16."""
    rows: list[Pairs] | list[Floats] = keys.arrays(PANEL, Pairs) if narrow else keys.arrays(PANEL, Floats)
    for i in e.loop(width, DEPTH):
        entries = [row[i] if narrow else narrowed(e, row[i], row[i + LANES]) for row in rows]
        target = panel.moved((i >> 1) * _PAIR_BYTES)
        for pair, vector in enumerate(e.transposed(entries)):
            target.moved(_PAIR_BYTES * pair)[0] = vector


def _pack_values(e: Emitter, first: Bytes, second: Bytes, width: Int, out: Pairs, *, narrow: bool) -> None:
    """Emit out[entry][2] of two values. `narrow`: they are bfloat16."""
    mixed = [lane // 2 + LANES * (lane % 2) for lane in range(DEPTH)]
    values = [value.as_(Int16s if narrow else Floats) for value in (first, second)]
    for i in e.loop(width, LANES):
        low, high = (value[i] for value in values)
        if narrow:
            pairs = low.shuffled(high, mixed)
        else:
            pairs = narrowed(e, low, high).as_(ir.VectorType(I16, DEPTH)).lanes(mixed)
        out[i * 2] = pairs


class _Tile:
    """Sums over pairs, for `num_rows` rows times TOGETHER vectors."""

    def __init__(self, e: Emitter, num_rows: int, left_MK: Pairs, left_stride: Int) -> None:
        self.e = e
        self.left_M = [row.as_(Floats) for row in left_MK.rows(left_stride, num_rows)]  # a pair a lane

    def add(self, sums_MN: list[Vector], right: Pairs, apart: Int, pairs: Int) -> None:
        """Add `pairs` pairs from the rows' start on; the pairs of `right` are `apart` bytes apart."""
        e = self.e
        for i in e.loop(pairs, _UNROLLED, sums_MN):
            for more in range(_UNROLLED):
                pair = i + more
                at = right.moved(pair * apart)
                vectors = [at[2 * LANES * n] for n in range(TOGETHER)]
                for m, left in enumerate(self.left_M):
                    one = e.splat(left.scalar(pair))
                    for n, vector in enumerate(vectors):
                        sums_MN[TOGETHER * m + n] = add_pairs(e, sums_MN[TOGETHER * m + n], one, vector)


class ScoreArguments(NamedTuple):
    """Arguments of the scores of M queries and J keys."""

    queries_MK: Pairs  # packed
    query_stride: Int
    pairs: Int  # of a query
    panels: Pairs  # packed keys
    keys: Int  # J
    scores_MJ: Floats
    scores_stride: Int


def _scores(e: Emitter, args: ScoreArguments, *, rows: int) -> None:
    """Emit scores[m, j] = query_m · key_j, TOGETHER panels at a time."""
    tile = _Tile(e, rows, args.queries_MK, args.query_stride)
    for key in e.loop(args.keys, TOGETHER * PANEL):
        panel = args.panels.moved((key * args.pairs) * 4)
        sums_MN = [e.constant(0.0)] * (rows * TOGETHER)
        tile.add(sums_MN, panel, e.int64(_PAIR_BYTES), args.pairs)
        for m in range(rows):
            scores = args.scores_MJ.moved(args.scores_stride * m + key * 4)
            for n in range(TOGETHER):
                scores[LANES * n] = sums_MN[TOGETHER * m + n]


class WeightedArguments(NamedTuple):
    """Arguments of the sums of values, weighted for M rows."""

    weights_MJ: Pairs
    weight_stride: Int
    pairs: Int  # of weights
    values: Pairs  # packed
    width: Int  # of a value
    factors_M: Floats
    out_MD: Floats


def _weighted(e: Emitter, args: WeightedArguments, *, rows: int) -> None:
    """Emit out[m, :] = out[m, :] · factor_m + Σ_j weight[m, j] · value_j, TOGETHER vectors of the values at a time."""
    tile = _Tile(e, rows, args.weights_MJ, args.weight_stride)
    factors = [e.splat(args.factors_M.scalar(m)) for m in range(rows)]
    apart = args.width * 4
    out_M = args.out_MD.rows(apart, rows)
    for entry in e.loop(args.width, LANES * TOGETHER):
        sums_MN = [out[entry + LANES * n] * factors[m] for m, out in enumerate(out_M) for n in range(TOGETHER)]
        tile.add(sums_MN, args.values.moved(entry * 4), apart, args.pairs)
        for m, out in enumerate(out_M):
            for n in range(TOGETHER):
                out[entry + LANES * n] = sums_MN[TOGETHER * m + n]


def _power(e: Emitter, x: Vector) -> Vector:
    """Return 2^x for x of at most a few ten-thousandths above 0; exactly 0 below -127 (-inf included)."""
    x = x.unordered(">", _MIN_POWER).choose(x, _MIN_POWER)
    turning = 1.5 * 2**23  # adding it rounds to the nearest integer, which is then in the lowest bits
    turned = x + turning
    rest = x - (turned - turning)
    poly = e.constant(_POWERS[-1])
    for factor in (*reversed(_POWERS[:-1]), 1.0):
        poly = e.fma(poly, rest, factor)
    whole = turned.as_(VI32) << 23
    return (poly.as_(VI32) + whole).as_(VF)


def _weigh(
    e: Emitter, scores: Floats, count: Int, first: Int, end: Int, factor: Float, state: Floats, weights: Pairs,
    shrink_at: Floats, *, masked: bool,
) -> None:  # fmt: skip
    """Emit one step of the online softmax, with powers of two, over a row of `count` scores, a multiple of DEPTH.

    `first` is the first visible position and `end` the first one after it that is not visible; scores are multiplied
    with `factor`. `state` holds the largest score so far, scaled, and the sum of weights as two floats. The factor that
    shrinks earlier sums is stored.
    """
    lowest, zero = e.constant(-math.inf), e.constant(0.0)

    def seen(i: Int) -> Vector:
        value = scores[i]
        if not masked:
            return value
        at = e.constant(range(LANES), VI32) + i.to_int32s()
        inside = (at >= first.to_int32s()) & (at < end.to_int32s())
        return inside.choose(value, lowest)

    tops = [lowest, lowest]
    for i in e.loop(count, DEPTH, tops):
        tops[:] = [e.larger(seen(i + LANES * n), top) for n, top in enumerate(tops)]
    top = e.larger(*tops)
    before, factors = e.splat(state.scalar()), e.splat(factor)
    largest = e.larger(e.reduce(top, e.larger) * factors, before)
    hidden = largest.equals(lowest)  # nothing seen yet: -inf minus -inf is NaN
    base = hidden.choose(zero, largest)
    minus = -base
    totals = [zero, zero]
    for i in e.loop(count, DEPTH, totals):
        powers = [_power(e, e.fma(seen(i + LANES * n), factors, minus)) for n in range(2)]
        weights[i] = narrowed(e, *powers)
        totals[:] = [total + power for total, power in zip(totals, powers, strict=True)]
    total = e.sum(totals[0] + totals[1])
    shrink = _power(e, before - base).lane(0)
    state[0] = largest.lane(0)
    state[1] = state.scalar(1) * shrink + total
    shrink_at[0] = shrink


def _score_rows(e: Emitter, num_rows: Int, args: ScoreArguments) -> None:
    def tile(rows: int) -> ir.Function:
        return emit_once(e.module, f"moiety_scores_{rows}", partial(_scores, rows=rows))

    call_by_rows(e, num_rows, MAX_ROWS, tile, args)


def _add_weighted_values(e: Emitter, num_rows: Int, args: WeightedArguments) -> None:
    def tile(rows: int) -> ir.Function:
        return emit_once(e.module, f"moiety_weighted_{rows}", partial(_weighted, rows=rows))

    call_by_rows(e, num_rows, MAX_ROWS, tile, args)


def _function(name: str, emit: Callable[..., None]) -> Any:
    return function(f"moiety_panels_{name}", emit, is_there=PAIRS_AVAILABLE)


pack_keys, pack_narrow_keys = (
    _function(f"pack_keys_{narrow}", partial(_pack_keys, narrow=narrow)) for narrow in (False, True)
)
pack_values, pack_narrow_values = (
    _function(f"pack_values_{narrow}", partial(_pack_values, narrow=narrow)) for narrow in (False, True)
)
weigh_scores, weigh_masked_scores = (
    _function(f"weigh_{masked}", partial(_weigh, masked=masked)) for masked in (False, True)
)
# products of 1 to MAX_ROWS rows, whose number is the first argument
score_rows = _function("scores", _score_rows)
add_weighted_values = _function("weighted", _add_weighted_values)
