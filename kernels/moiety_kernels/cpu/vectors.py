"""The vector code that dominates the kernels' run time.

All counts must be multiples of LANES; alignment is not required.
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from llvmlite import ir

from moiety_kernels.cpu.emitter import (
    F32,
    I32,
    I64,
    LANES,
    VOID,
    Emitter,
    call_by_rows,
    constant,
    emit_once,
    function,
)
from moiety_kernels.cpu.instructions import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable

TILE_ROWS = 6 if WIDE else 3  # rows of the largest dot tile: TILE_ROWS × TILE_COLS accumulators fill the registers
TILE_COLS = 4
AXPY_ROWS = 4 if WIDE else 2
_LINE, _LINES_AT_ONCE = 64, 4  # bytes of a cache line, and lines prefetched per iteration


def _dot(e: Emitter, rows: int, cols: int, widen: bool) -> None:
    """Emit out[m, n] = Σ_k row_m[k] · w[n, k]; arguments: row pointers, w, w stride, k, out, out stride."""
    pointers, w, w_stride, count, out, out_stride = e.function.args
    builder = e.builder
    starts = [builder.load(e.pointer(pointers, 8 * m), typ=I64, align=8) for m in range(rows)]
    columns = [builder.add(w, builder.mul(w_stride, I64(n))) for n in range(cols)]
    ahead = builder.mul(w_stride, I64(cols))

    def body(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        w_offset = builder.mul(i, I64(2 if widen else 4))
        load = e.load_widened if widen else e.load
        loaded = [load(column, w_offset) for column in columns]
        if widen:  # straight from memory: prefetch the next tile's rows
            for column in columns:
                e.prefetch(column, builder.add(w_offset, ahead))
        results = []
        for m, start in enumerate(starts):
            x = e.load(start, builder.mul(i, I64(4)))
            results += [e.fma(x, loaded[n], sums[m * cols + n]) for n in range(cols)]
        return results

    sums = e.loop(count, LANES, [constant(0.0)] * (rows * cols), body)
    group = LANES // cols  # rows whose sums fill one vector
    for first in range(0, rows, group):
        some = min(group, rows - first)
        totals = e.lane_sums(sums[first * cols : (first + some) * cols])
        for m in range(some):
            mask = ir.Constant(ir.VectorType(I32, cols), [m * cols + n for n in range(cols)])
            part = builder.shuffle_vector(totals, totals, mask)
            e.store(part, out, builder.mul(out_stride, I64(first + m)))


def _axpy(e: Emitter, rows: int, vectors: int, widen: bool) -> None:
    """Emit out[m, :] += Σ_j p[m, j] · v[j, :], where [:] is `vectors` vectors.

    Arguments: p, p stride, v, v stride, count of j, out, out stride.
    """
    load, size = (e.load_widened, 2) if widen else (e.load, 4)
    p, p_stride, v, v_stride, count, out, out_stride = e.function.args
    builder = e.builder
    p_rows = [builder.add(p, builder.mul(p_stride, I64(m))) for m in range(rows)]
    out_rows = [builder.add(out, builder.mul(out_stride, I64(m))) for m in range(rows)]
    starts = [e.load(out_rows[m], 4 * LANES * n) for m in range(rows) for n in range(vectors)]

    def body(j: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        value_row = builder.add(v, builder.mul(j, v_stride))
        values = [load(value_row, I64(size * LANES * n)) for n in range(vectors)]
        results = []
        for m in range(rows):
            factor = e.splat(e.load_scalar(p_rows[m], builder.mul(j, I64(4))))
            results += [e.fma(factor, values[n], sums[m * vectors + n]) for n in range(vectors)]
        return results

    sums = e.loop(count, 1, starts, body)
    for m in range(rows):
        for n in range(vectors):
            e.store(sums[m * vectors + n], out_rows[m], 4 * LANES * n)


def _widen(e: Emitter) -> None:
    """Emit out[i] = float32(w[i]) for bfloat16 w; arguments: w, count, out."""
    w, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(2))
        e.store(e.load_widened(w, offset), out, e.builder.mul(i, I64(4)))
        e.prefetch(w, e.builder.add(offset, e.builder.mul(count, I64(2))))
        return []

    e.loop(count, LANES, [], body)


def _narrow(e: Emitter) -> None:
    """Emit out[i] = bfloat16(row[i]); arguments: row, count, out."""
    row, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        e.store_narrowed(e.load(row, e.builder.mul(i, I64(4))), out, e.builder.mul(i, I64(2)))
        return []

    e.loop(count, LANES, [], body)


def _over_one_plus_exp(e: Emitter, numerator: ir.Value, x: ir.Value) -> ir.Value:
    """Return numerator / (1 + e^-x) = numerator · sigmoid(x)."""
    negated = e.builder.fsub(constant(0.0), x)
    capped = e.builder.select(e.builder.fcmp_ordered("<", negated, constant(88.0)), negated, constant(88.0))
    return e.builder.fdiv(numerator, e.builder.fadd(constant(1.0), e.exp(capped)))


def _gated(e: Emitter, combine: Callable[..., ir.Value]) -> None:
    """Emit out[i] = combine(gate[i], up[i], *further).

    Arguments: gate, up, count, out, and further arguments of `combine`.
    """
    gate, up, count, out, *further = e.function.args
    values = [e.splat(value) for value in further]

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(4))
        e.store(combine(e, e.load(gate, offset), e.load(up, offset), *values), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _swiglu(e: Emitter, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Return silu(gate) · up."""
    return e.builder.fmul(_over_one_plus_exp(e, gate, gate), up)


def _geglu(e: Emitter, gate: ir.Value, up: ir.Value) -> ir.Value:
    """Return gelu(gate) · up with the tanh approximation: (1 + tanh(x)) / 2 is sigmoid(2 · x)."""
    cubic = e.builder.fmul(e.builder.fmul(gate, gate), gate)
    inner = e.fma(cubic, constant(0.044715), gate)
    gelu = _over_one_plus_exp(e, gate, e.builder.fmul(inner, constant(2 * math.sqrt(2 / math.pi))))
    return e.builder.fmul(gelu, up)


def _clipped(e: Emitter, gate: ir.Value, up: ir.Value, limit: ir.Value, alpha: ir.Value) -> ir.Value:
    """Return (up + 1) · gate · sigmoid(alpha · gate), with gate at most `limit` and up within ±`limit`."""
    gate = e.smaller(gate, limit)
    up = e.larger(e.smaller(up, limit), e.builder.fsub(constant(0.0), limit))
    glu = _over_one_plus_exp(e, gate, e.builder.fmul(gate, alpha))
    return e.builder.fmul(e.builder.fadd(up, constant(1.0)), glu)


def _softmax(e: Emitter) -> None:
    """Emit one step of the online softmax (Milakov & Gimelshein 2018) over a row of scores.

    Arguments: scores, count, state. `state` holds the largest score and the sum so far as two floats. The step replaces
    scores by e^(score - largest), updates the state, and returns the factor by which earlier sums shrink.
    """
    scores, count, state = e.function.args
    builder = e.builder
    lowest = constant(-math.inf)
    (largest,) = e.loop(count, LANES, [lowest], lambda i, top: [e.larger(e.load(scores, builder.mul(i, I64(4))), top)])
    before = e.splat(e.load_scalar(state))
    largest = e.larger(e.reduce(largest, e.larger), before)
    hidden = builder.fcmp_ordered("==", largest, lowest)  # nothing seen yet: -inf minus -inf is NaN
    base = builder.select(hidden, constant(0.0), largest)

    def body(i: ir.Value, total: ir.Value) -> list[ir.Value]:
        offset = builder.mul(i, I64(4))
        weight = e.exp(builder.fsub(e.load(scores, offset), base))
        e.store(weight, scores, offset)
        return [builder.fadd(total, weight)]

    (total,) = e.loop(count, LANES, [constant(0.0)], body)
    shrink = builder.extract_element(e.exp(builder.fsub(before, base)), I32(0))
    total = builder.extract_element(e.reduce(total, builder.fadd), I32(0))
    e.store(builder.extract_element(largest, I32(0)), state)
    e.store(builder.fadd(builder.fmul(e.load_scalar(state, 4), shrink), total), state, 4)
    builder.ret(shrink)


def _scale(e: Emitter) -> None:
    """Emit row[i] *= factor; arguments: row, count, factor."""
    row, count, factor = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(4))
        e.store(e.builder.fmul(e.load(row, offset), factors), row, offset)
        return []

    e.loop(count, LANES, [], body)


def _sum_squares(e: Emitter) -> None:
    """Emit Σ row[i]²; arguments: row, count."""
    row, count = e.function.args

    def body(i: ir.Value, total: ir.Value) -> list[ir.Value]:
        value = e.load(row, e.builder.mul(i, I64(4)))
        return [e.fma(value, value, total)]

    (total,) = e.loop(count, LANES, [constant(0.0)], body)
    e.builder.ret(e.builder.extract_element(e.reduce(total, e.builder.fadd), I32(0)))


def _weigh(e: Emitter) -> None:
    """Emit out[i] = (row[i] · factor) · weight[i]; arguments: row, count, factor, weight, out."""
    row, count, factor, weight, out = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(4))
        scaled = e.builder.fmul(e.load(row, offset), factors)
        e.store(e.builder.fmul(scaled, e.load(weight, offset)), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _add_scaled(e: Emitter) -> None:
    """Emit out[i] = a[i] + b[i] · factor; arguments: a, b, count, factor, out."""
    a, b, count, factor, out = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(4))
        e.store(e.fma(e.load(b, offset), factors, e.load(a, offset)), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _rotate(e: Emitter) -> None:
    """Rotate each pair (row[i], row[i + count]) by its angle; arguments: row, count of pairs, cos, sin."""
    row, count, cos, sin = e.function.args
    builder = e.builder
    half = builder.mul(count, I64(4))

    def body(i: ir.Value) -> list[ir.Value]:
        offset = builder.mul(i, I64(4))
        upper = builder.add(offset, half)
        a, b, c, s = e.load(row, offset), e.load(row, upper), e.load(cos, offset), e.load(sin, offset)
        e.store(builder.fsub(builder.fmul(a, c), builder.fmul(b, s)), row, offset)
        e.store(builder.fadd(builder.fmul(b, c), builder.fmul(a, s)), row, upper)
        return []

    e.loop(count, LANES, [], body)


def _copy(e: Emitter) -> None:
    """Emit out[i] = row[i]; arguments: row, count, out."""
    row, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, I64(4))
        e.store(e.load(row, offset), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _fetch(e: Emitter) -> None:
    """Prefetch `count` bytes from an address on into the L2 cache."""
    address, count = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        for line in range(_LINES_AT_ONCE):
            e.prefetch(address, e.builder.add(i, I64(_LINE * line)), locality=2)
        return []

    e.loop(count, _LINE * _LINES_AT_ONCE, [], body)


def dot_tile(rows: int, cols: int, *, widen: bool) -> Any:
    """Return the function out[m, n] = Σ_k row_m[k] · w[n, k].

    Its arguments are (row pointers, w, w stride, k, out, out stride). `widen`: w is bfloat16.
    """
    return function(f"moiety_dot_{rows}_{cols}_{widen}", [I64] * 6, partial(_dot, rows=rows, cols=cols, widen=widen))


def dot_tiles(cols: int, *, widen: bool) -> Any:
    """Return the function of `dot_tile` for a number of rows, up to TILE_ROWS, that is its first argument."""
    kinds = [I64] * 6

    def choose(e: Emitter) -> None:
        def tile(rows: int) -> ir.Function:
            emit = partial(_dot, rows=rows, cols=cols, widen=widen)
            return emit_once(e.module, f"moiety_dot_{rows}_{cols}_{widen}", kinds, emit, VOID)

        call_by_rows(e, TILE_ROWS, tile)

    return function(f"moiety_dots_{cols}_{widen}", [I64, *kinds], choose)


def axpy_tile(rows: int, vectors: int, *, widen: bool) -> Any:
    """Return the function out[m, :] += Σ_j p[m, j] · v[j, :].

    Its arguments are (p, p stride, v, v stride, count, out, out stride). `widen`: v is bfloat16.
    """
    emit = partial(_axpy, rows=rows, vectors=vectors, widen=widen)
    return function(f"moiety_axpy_{rows}_{vectors}_{widen}", [I64] * 7, emit)


widen_row = function("moiety_widen", [I64] * 3, _widen)
narrow_row = function("moiety_narrow", [I64] * 3, _narrow)
swiglu_row = function("moiety_swiglu", [I64] * 4, partial(_gated, combine=_swiglu))
geglu_row = function("moiety_geglu", [I64] * 4, partial(_gated, combine=_geglu))
clipped_row = function("moiety_clipped", [*[I64] * 4, F32, F32], partial(_gated, combine=_clipped))
softmax_step = function("moiety_softmax", [I64] * 3, _softmax, F32)
scale_row = function("moiety_scale", [I64, I64, F32], _scale)
sum_squares = function("moiety_sum_squares", [I64] * 2, _sum_squares, F32)
weigh_row = function("moiety_weigh", [I64, I64, F32, I64, I64], _weigh)
add_scaled_row = function("moiety_add_scaled", [I64, I64, I64, F32, I64], _add_scaled)
rotate_row = function("moiety_rotate", [I64] * 4, _rotate)
copy_row = function("moiety_copy", [I64] * 3, _copy)
fetch = function("moiety_fetch", [I64] * 2, _fetch)
