"""The vector code that dominates the kernels' run time.

M rows, N weight rows, K width, J positions of a cache. All counts must be multiples of LANES; alignment is not
required.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir

from moiety_kernels.cpu.emitter import Emitter, call_by_rows, emit_once, function
from moiety_kernels.cpu.instructions import WIDE
from moiety_kernels.cpu.values import LANES, Addresses, BFloats, Bytes, Float, Floats, Int, Vector

TILE_ROWS = 6 if WIDE else 3  # rows of the largest dot tile: TILE_ROWS × TILE_COLS accumulators fill the registers
TILE_COLS = 4
TILES_AHEAD = 2  # prefetch distance in tiles of weight rows
AXPY_ROWS = 4 if WIDE else 2
_LINE, _LINES_AT_ONCE = 64, 4  # bytes of a cache line, and lines prefetched per iteration


class DotArguments(NamedTuple):
    """Arguments of a tile of dot products."""

    rows_M: Addresses
    w_NK: Bytes
    w_stride: Int
    k: Int
    out_MN: Floats
    out_stride: Int


def _dot(e: Emitter, args: DotArguments, *, rows: int, cols: int, widen: bool) -> None:
    """Emit out[m, n] = Σ_k row_m[k] · w[n, k]; `widen`: w is bfloat16."""
    x_M = args.rows_M.arrays(rows, Floats)
    w = args.w_NK.as_(BFloats if widen else Floats)
    w_N = w.rows(args.w_stride, cols)
    ahead = w.moved(args.w_stride * (cols * TILES_AHEAD))
    sums_MN = [e.constant(0.0)] * (rows * cols)
    for k in e.loop(args.k, LANES, sums_MN):
        if widen:  # straight from memory: prefetch the following tiles' rows, one after the other
            for line in range(0, 2 * LANES * cols, _LINE):
                ahead.prefetch(k * cols + line // 2, locality=2)
        x_values_M = [x[k] for x in x_M]
        for n, w_K in enumerate(w_N):  # a register for one weight vector, so that all sums have theirs
            w_values = w_K[k]
            for m, x_values in enumerate(x_values_M):
                sums_MN[m * cols + n] = e.fma(x_values, w_values, sums_MN[m * cols + n])
    e.store_lane_sums(sums_MN, cols, args.out_MN, args.out_stride)


def _axpy(
    e: Emitter, p_MJ: Floats, p_stride: Int, v_JD: Bytes, v_stride: Int, count: Int, out_MD: Floats, out_stride: Int,
    *, rows: int, vectors: int, widen: bool,
) -> None:  # fmt: skip
    """Emit out[m, :] += Σ_j p[m, j] · v[j, :] for `count` positions j, where [:] is `vectors` vectors.

    `widen`: v is bfloat16.
    """
    p_M, out_M = p_MJ.rows(p_stride, rows), out_MD.rows(out_stride, rows)
    v = v_JD.as_(BFloats if widen else Floats)
    sums = [out[LANES * n] for out in out_M for n in range(vectors)]
    for j in e.loop(count, 1, sums):
        v_D = v.moved(j * v_stride)
        values = [v_D[LANES * n] for n in range(vectors)]
        for m, p in enumerate(p_M):
            weight = e.splat(p.scalar(j))
            for n, value in enumerate(values):
                sums[m * vectors + n] = e.fma(weight, value, sums[m * vectors + n])
    for m, out in enumerate(out_M):
        for n in range(vectors):
            out[LANES * n] = sums[m * vectors + n]


def _widen(e: Emitter, w: BFloats, count: Int, out: Floats) -> None:
    """Emit out[i] = float32(w[i])."""
    for i in e.loop(count, LANES):
        out[i] = w[i]
        w.prefetch(i + count)


def _narrow(e: Emitter, row: Floats, count: Int, out: BFloats) -> None:
    """Emit out[i] = bfloat16(row[i])."""
    for i in e.loop(count, LANES):
        out[i] = row[i]


def over_one_plus_exp(e: Emitter, numerator: Vector, x: Vector) -> Vector:
    """Return numerator / (1 + e^-x) = numerator · sigmoid(x)."""
    negated = -x
    capped = (negated < 88.0).choose(negated, 88.0)
    return numerator / (1.0 + e.exp(capped))


def _swiglu(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = silu(gate[i]) · up[i]."""
    for i in e.loop(count, LANES):
        gates, ups = gate[i], up[i]
        out[i] = over_one_plus_exp(e, gates, gates) * ups


def _geglu(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = gelu(gate[i]) · up[i] with the tanh approximation: (1 + tanh(x)) / 2 is sigmoid(2 · x)."""
    for i in e.loop(count, LANES):
        gates, ups = gate[i], up[i]
        inner = e.fma(gates * gates * gates, 0.044715, gates)
        out[i] = over_one_plus_exp(e, gates, inner * (2 * math.sqrt(2 / math.pi))) * ups


def _limited_swiglu(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats, limit: Float) -> None:
    """Emit out[i] = silu(gate[i]) · up[i], with gates ≤ `limit` and ups within ±`limit`."""
    limits = e.splat(limit)
    for i in e.loop(count, LANES):
        gates, ups = e.smaller(gate[i], limits), e.larger(e.smaller(up[i], limits), -limits)
        out[i] = over_one_plus_exp(e, gates, gates) * ups


def _scaled_swiglu(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats, alpha: Float) -> None:
    """Emit out[i] = silu(alpha · gate[i]) · up[i]."""
    alphas = e.splat(alpha)
    for i in e.loop(count, LANES):
        gates, ups = gate[i] * alphas, up[i]
        out[i] = over_one_plus_exp(e, gates, gates) * ups


def _clipped(e: Emitter, gate: Floats, up: Floats, count: Int, out: Floats, limit: Float, alpha: Float) -> None:
    """Emit out[i] = (up[i] + 1) · gate[i] · sigmoid(alpha · gate[i]), with gates ≤ `limit` and ups within ±`limit`."""
    limits, alphas = e.splat(limit), e.splat(alpha)
    for i in e.loop(count, LANES):
        gates, ups = gate[i], up[i]
        gates = e.smaller(gates, limits)
        ups = e.larger(e.smaller(ups, limits), -limits)
        glu = over_one_plus_exp(e, gates, gates * alphas)
        out[i] = (ups + 1.0) * glu


def _relu2(e: Emitter, up: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = max(up[i], 0)²."""
    zeros = e.constant(0.0)
    for i in e.loop(count, LANES):
        positive = e.larger(up[i], zeros)
        out[i] = positive * positive


def _softmax(e: Emitter, scores: Floats, count: Int, state: Floats) -> Float:
    """Emit one step of the online softmax (Milakov & Gimelshein 2018) over a row of scores.

    `state` holds the largest score and the sum so far as two floats. The step replaces scores by e^(score - largest),
    updates the state, and returns the factor by which earlier sums shrink.
    """
    lowest = e.constant(-math.inf)
    top = [lowest]
    for i in e.loop(count, LANES, top):
        top[0] = e.larger(scores[i], top[0])
    before = e.splat(state.scalar())
    largest = e.larger(e.reduce(top[0], e.larger), before)
    hidden = largest.equals(lowest)  # nothing seen yet: -inf minus -inf is NaN
    base = hidden.choose(e.constant(0.0), largest)
    total = [e.constant(0.0)]
    for i in e.loop(count, LANES, total):
        weights = e.exp(scores[i] - base)
        scores[i] = weights
        total[0] = total[0] + weights
    shrink = e.exp(before - base).lane(0)
    sum_here = e.sum(total[0])
    state[0] = largest.lane(0)
    state[1] = state.scalar(1) * shrink + sum_here
    return shrink


def _scale(e: Emitter, row: Floats, count: Int, factor: Float) -> None:
    """Emit row[i] *= factor."""
    factors = e.splat(factor)
    for i in e.loop(count, LANES):
        row[i] = row[i] * factors


def _sum_squares(e: Emitter, row: Floats, count: Int) -> Float:
    """Emit Σ row[i]²."""
    total = [e.constant(0.0)]
    for i in e.loop(count, LANES, total):
        values = row[i]
        total[0] = e.fma(values, values, total[0])
    return e.sum(total[0])


def _weigh(e: Emitter, row: Floats, count: Int, factor: Float, weight: Floats, out: Floats) -> None:
    """Emit out[i] = (row[i] · factor) · weight[i]."""
    factors = e.splat(factor)
    for i in e.loop(count, LANES):
        out[i] = (row[i] * factors) * weight[i]


def _add_scaled(e: Emitter, a: Floats, b: Floats, count: Int, factor: Float, out: Floats) -> None:
    """Emit out[i] = a[i] + b[i] · factor."""
    factors = e.splat(factor)
    for i in e.loop(count, LANES):
        out[i] = e.fma(b[i], factors, a[i])


def _rotate(e: Emitter, row: Floats, count: Int, cos: Floats, sin: Floats) -> None:
    """Rotate each of `count` pairs (row[i], row[i + count]) by its angle."""
    upper = row.moved(count * 4)
    for i in e.loop(count, LANES):
        a, b, c, s = row[i], upper[i], cos[i], sin[i]
        row[i] = a * c - b * s
        upper[i] = b * c + a * s


def _copy(e: Emitter, row: Floats, count: Int, out: Floats) -> None:
    """Emit out[i] = row[i]."""
    for i in e.loop(count, LANES):
        out[i] = row[i]


def _fetch(e: Emitter, memory: Bytes, count: Int) -> None:
    """Prefetch `count` bytes into the L2 cache."""
    for i in e.loop(count, _LINE * _LINES_AT_ONCE):
        for line in range(_LINES_AT_ONCE):
            memory.prefetch(i + _LINE * line, locality=2)


def dot_tile(rows: int, cols: int, *, widen: bool) -> Any:
    """Return the function out[m, n] = Σ_k row_m[k] · w[n, k]; `widen`: w is bfloat16."""
    return function(_dot_name(rows, cols, widen), partial(_dot, rows=rows, cols=cols, widen=widen))


def dot_tiles(cols: int, *, widen: bool) -> Any:
    """Return the function of `dot_tile` for a number of rows, up to TILE_ROWS, that is its first argument."""

    def choose(e: Emitter, num_rows: Int, args: DotArguments) -> None:
        def tile(rows: int) -> ir.Function:
            emit = partial(_dot, rows=rows, cols=cols, widen=widen)
            return emit_once(e.module, _dot_name(rows, cols, widen), emit)

        call_by_rows(e, num_rows, TILE_ROWS, tile, args)

    return function(f"moiety_dots_{cols}_{widen}", choose)


def _dot_name(rows: int, cols: int, widen: bool) -> str:
    return f"moiety_dot_{rows}_{cols}_{widen}"


def axpy_tile(rows: int, vectors: int, *, widen: bool) -> Any:
    """Return the function out[m, :] += Σ_j p[m, j] · v[j, :]; `widen`: v is bfloat16."""
    emit = partial(_axpy, rows=rows, vectors=vectors, widen=widen)
    return function(f"moiety_axpy_{rows}_{vectors}_{widen}", emit)


widen_row = function("moiety_widen", _widen)
narrow_row = function("moiety_narrow", _narrow)
swiglu_row = function("moiety_swiglu", _swiglu)
geglu_row = function("moiety_geglu", _geglu)
limited_swiglu_row = function("moiety_limited_swiglu", _limited_swiglu)
scaled_swiglu_row = function("moiety_scaled_swiglu", _scaled_swiglu)
clipped_row = function("moiety_clipped", _clipped)
relu2_row = function("moiety_relu2", _relu2)
softmax_step = function("moiety_softmax", _softmax)
scale_row = function("moiety_scale", _scale)
sum_squares = function("moiety_sum_squares", _sum_squares)
weigh_row = function("moiety_weigh", _weigh)
add_scaled_row = function("moiety_add_scaled", _add_scaled)
rotate_row = function("moiety_rotate", _rotate)
copy_row = function("moiety_copy", _copy)
fetch = function("moiety_fetch", _fetch)
