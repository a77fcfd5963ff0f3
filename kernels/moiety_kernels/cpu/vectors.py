"""The vector code that kernels spend their time in, emitted as LLVM IR with explicit vectors of LANES floats.

Written out rather than left to the compiler, for it must not depend on what the vectorizer makes of a loop: the result
of one row is bit for bit the same whatever rows are computed beside it. All addresses and strides are int64 bytes, all
counts must be multiples of LANES, nothing needs alignment. Each function is emitted once into the module that uses it.
"""

from __future__ import annotations

import inspect
import math
from functools import partial
from typing import TYPE_CHECKING, Any

import llvmlite.binding as llvm
from llvmlite import ir
from numba.core import types

from moiety_kernels.cpu.compiling import emitted

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

WIDE = bool(llvm.get_host_cpu_features().get("avx512f"))
LANES = 16 if WIDE else 8
TILE_ROWS = 6 if WIDE else 3  # rows of the largest dot tile: TILE_ROWS × TILE_COLS accumulators fill the registers
TILE_COLS = 4
AXPY_ROWS = 4 if WIDE else 2

_F32, _I16, _I32, _I64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VF, _VI16, _VI32 = (ir.VectorType(kind, LANES) for kind in (_F32, _I16, _I32))
_PTR = ir.PointerType()


def _constant(value: float) -> ir.Constant:
    return ir.Constant(_VF, [value] * LANES)


class _Emitter:
    """Builds one function: int64 and float arguments, straight code and loops over vectors."""

    def __init__(self, module: ir.Module, name: str, kinds: Sequence[ir.Type], result: ir.Type) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, list(kinds)), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    def intrinsic(self, name: str, result: ir.Type, kinds: Sequence[ir.Type], *args: ir.Value) -> ir.Value:
        known = self.module.globals.get(name)
        function = known or ir.Function(self.module, ir.FunctionType(result, list(kinds)), name)
        return self.builder.call(function, args)

    def fma(self, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
        return self.intrinsic(f"llvm.fma.v{LANES}f32", _VF, [_VF] * 3, a, b, c)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def pointer(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        offset = _I64(offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, offset), _PTR)

    def load(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        return self.builder.load(self.pointer(address, offset), typ=_VF, align=4)

    def load_widened(self, address: ir.Value, offset: ir.Value) -> ir.Value:
        """LANES bfloat16 as float32: their bits are the upper half of the float's."""
        raw = self.builder.load(self.pointer(address, offset), typ=_VI16, align=2)
        wide = self.builder.zext(raw, _VI32)
        return self.builder.bitcast(self.builder.shl(wide, ir.Constant(_VI32, [16] * LANES)), _VF)

    def load_scalar(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        return self.builder.load(self.pointer(address, offset), typ=_F32, align=4)

    def store(self, value: ir.Value, address: ir.Value, offset: ir.Value | int = 0) -> None:
        self.builder.store(value, self.pointer(address, offset), align=4)

    def prefetch(self, address: ir.Value, offset: ir.Value) -> None:
        kinds = [_PTR, _I32, _I32, _I32]
        args = [self.pointer(address, offset), _I32(0), _I32(3), _I32(1)]
        self.intrinsic("llvm.prefetch.p0", ir.VoidType(), kinds, *args)

    def splat(self, scalar: ir.Value) -> ir.Value:
        one = self.builder.insert_element(ir.Constant(_VF, ir.Undefined), scalar, _I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(_VI32, [0] * LANES))

    def loop(
        self, count: ir.Value, step: int, starts: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]
    ) -> list[ir.Value]:
        """`values = body(i, *values)` for i = 0, step, … < count, at least once; returns the last values."""
        builder, before = self.builder, self.builder.block
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(_I64)
        index.add_incoming(_I64(0), before)
        carried = [builder.phi(start.type) for start in starts]
        for phi, start in zip(carried, starts, strict=True):
            phi.add_incoming(start, before)
        results = list(body(index, *carried))
        following = builder.add(index, _I64(step))
        index.add_incoming(following, builder.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results

    def lane_sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """One vector whose lane i is the sum over the lanes of vectors[i]; always added in the same tree."""
        level = [*vectors, *[_constant(0.0)] * (LANES - len(vectors))]
        width = LANES
        while width > 1:
            half = width // 2
            low = [s + i for s in range(0, 2 * LANES, width) for i in range(half)]
            high = [lane + half for lane in low]
            level = [
                self.builder.fadd(
                    self.builder.shuffle_vector(a, b, ir.Constant(_VI32, low)),
                    self.builder.shuffle_vector(a, b, ir.Constant(_VI32, high)),
                )
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
            width = half
        return level[0]

    def reduce(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """All lanes combined in a fixed tree, in every lane."""
        width = LANES
        while width > 1:
            width //= 2
            mask = ir.Constant(_VI32, [lane ^ width for lane in range(LANES)])
            vector = combine(vector, self.builder.shuffle_vector(vector, vector, mask))
        return vector

    def exp(self, x: ir.Value) -> ir.Value:
        """e^x to about one unit in the last place; 0 below -87.3 (-inf included), x must not exceed 88."""
        builder = self.builder
        vanishes = builder.fcmp_ordered("<", x, _constant(-87.3))
        x = self.larger(x, _constant(-87.3))
        turns = self.intrinsic(f"llvm.rint.v{LANES}f32", _VF, [_VF], builder.fmul(x, _constant(1 / math.log(2))))
        rest = self.fma(turns, _constant(-0.693359375), x)
        rest = self.fma(turns, _constant(2.12194440e-4), rest)
        poly = _constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            poly = self.fma(poly, rest, _constant(1 / divisor))
        bits = builder.add(builder.fptosi(turns, _VI32), ir.Constant(_VI32, [127] * LANES))
        power = builder.bitcast(builder.shl(bits, ir.Constant(_VI32, [23] * LANES)), _VF)
        return builder.select(vanishes, _constant(0.0), builder.fmul(poly, power))


def _dot(e: _Emitter, rows: int, cols: int, widen: bool) -> None:
    """out[m, n] = Σ_k row_m[k] · w[n, k]; arguments: row pointers, w, w stride, k, out, out stride."""
    pointers, w, w_stride, count, out, out_stride = e.function.args
    builder = e.builder
    starts = [builder.load(e.pointer(pointers, 8 * m), typ=_I64, align=8) for m in range(rows)]
    columns = [builder.add(w, builder.mul(w_stride, _I64(n))) for n in range(cols)]
    ahead = builder.mul(w_stride, _I64(cols))

    def body(i: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        w_offset = builder.mul(i, _I64(2 if widen else 4))
        load = e.load_widened if widen else e.load
        loaded = [load(column, w_offset) for column in columns]
        if widen:  # straight from memory: ask for the next tile's rows
            for column in columns:
                e.prefetch(column, builder.add(w_offset, ahead))
        results = []
        for m, start in enumerate(starts):
            x = e.load(start, builder.mul(i, _I64(4)))
            results += [e.fma(x, loaded[n], sums[m * cols + n]) for n in range(cols)]
        return results

    sums = e.loop(count, LANES, [_constant(0.0)] * (rows * cols), body)
    group = LANES // cols  # rows whose sums fill one vector
    for first in range(0, rows, group):
        some = min(group, rows - first)
        totals = e.lane_sums(sums[first * cols : (first + some) * cols])
        for m in range(some):
            mask = ir.Constant(ir.VectorType(_I32, cols), [m * cols + n for n in range(cols)])
            part = builder.shuffle_vector(totals, totals, mask)
            e.store(part, out, builder.mul(out_stride, _I64(first + m)))


def _axpy(e: _Emitter, rows: int, vectors: int) -> None:
    """out[m, :] += Σ_j p[m, j] · v[j, :], :] being `vectors` vectors; arguments: p, p stride, v, v stride, count of j,
    out, out stride."""
    p, p_stride, v, v_stride, count, out, out_stride = e.function.args
    builder = e.builder
    p_rows = [builder.add(p, builder.mul(p_stride, _I64(m))) for m in range(rows)]
    out_rows = [builder.add(out, builder.mul(out_stride, _I64(m))) for m in range(rows)]
    starts = [e.load(out_rows[m], 4 * LANES * n) for m in range(rows) for n in range(vectors)]

    def body(j: ir.Value, *sums: ir.Value) -> list[ir.Value]:
        value_row = builder.add(v, builder.mul(j, v_stride))
        values = [e.load(value_row, 4 * LANES * n) for n in range(vectors)]
        results = []
        for m in range(rows):
            factor = e.splat(e.load_scalar(p_rows[m], builder.mul(j, _I64(4))))
            results += [e.fma(factor, values[n], sums[m * vectors + n]) for n in range(vectors)]
        return results

    sums = e.loop(count, 1, starts, body)
    for m in range(rows):
        for n in range(vectors):
            e.store(sums[m * vectors + n], out_rows[m], 4 * LANES * n)


def _widen(e: _Emitter) -> None:
    """out[i] = float32(w[i]) for bfloat16 w; arguments: w, count, out."""
    w, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, _I64(2))
        e.store(e.load_widened(w, offset), out, e.builder.mul(i, _I64(4)))
        e.prefetch(w, e.builder.add(offset, e.builder.mul(count, _I64(2))))
        return []

    e.loop(count, LANES, [], body)


def _swiglu(e: _Emitter) -> None:
    """out[i] = silu(gate[i]) · up[i]; arguments: gate, up, count, out."""
    gate, up, count, out = e.function.args

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, _I64(4))
        g = e.load(gate, offset)
        negated = e.builder.fsub(_constant(0.0), g)
        capped = e.builder.select(e.builder.fcmp_ordered("<", negated, _constant(88.0)), negated, _constant(88.0))
        silu = e.builder.fdiv(g, e.builder.fadd(_constant(1.0), e.exp(capped)))
        e.store(e.builder.fmul(silu, e.load(up, offset)), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _softmax(e: _Emitter) -> None:
    """One step of the online softmax (Milakov & Gimelshein 2018) over a row of scores; arguments: scores, count, state.

    `state` holds the largest score and the sum so far as two floats. Scores are replaced by e^(score - largest), the
    state is brought up to date, and the factor by which earlier sums shrink is returned.
    """
    scores, count, state = e.function.args
    builder = e.builder
    lowest = _constant(-math.inf)
    (largest,) = e.loop(count, LANES, [lowest], lambda i, top: [e.larger(e.load(scores, builder.mul(i, _I64(4))), top)])
    before = e.splat(e.load_scalar(state))
    largest = e.larger(e.reduce(largest, e.larger), before)
    hidden = builder.fcmp_ordered("==", largest, lowest)  # nothing seen yet: -inf minus -inf is no number
    base = builder.select(hidden, _constant(0.0), largest)

    def body(i: ir.Value, total: ir.Value) -> list[ir.Value]:
        offset = builder.mul(i, _I64(4))
        weight = e.exp(builder.fsub(e.load(scores, offset), base))
        e.store(weight, scores, offset)
        return [builder.fadd(total, weight)]

    (total,) = e.loop(count, LANES, [_constant(0.0)], body)
    shrink = builder.extract_element(e.exp(builder.fsub(before, base)), _I32(0))
    total = builder.extract_element(e.reduce(total, builder.fadd), _I32(0))
    e.store(builder.extract_element(largest, _I32(0)), state)
    e.store(builder.fadd(builder.fmul(e.load_scalar(state, 4), shrink), total), state, 4)
    builder.ret(shrink)


def _scale(e: _Emitter) -> None:
    """row[i] *= factor; arguments: row, count, factor."""
    row, count, factor = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, _I64(4))
        e.store(e.builder.fmul(e.load(row, offset), factors), row, offset)
        return []

    e.loop(count, LANES, [], body)


def _sum_squares(e: _Emitter) -> None:
    """Σ row[i]²; arguments: row, count."""
    row, count = e.function.args

    def body(i: ir.Value, total: ir.Value) -> list[ir.Value]:
        value = e.load(row, e.builder.mul(i, _I64(4)))
        return [e.fma(value, value, total)]

    (total,) = e.loop(count, LANES, [_constant(0.0)], body)
    e.builder.ret(e.builder.extract_element(e.reduce(total, e.builder.fadd), _I32(0)))


def _weigh(e: _Emitter) -> None:
    """out[i] = (row[i] · factor) · weight[i]; arguments: row, count, factor, weight, out."""
    row, count, factor, weight, out = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, _I64(4))
        scaled = e.builder.fmul(e.load(row, offset), factors)
        e.store(e.builder.fmul(scaled, e.load(weight, offset)), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _add_scaled(e: _Emitter) -> None:
    """out[i] = a[i] + b[i] · factor; arguments: a, b, count, factor, out."""
    a, b, count, factor, out = e.function.args
    factors = e.splat(factor)

    def body(i: ir.Value) -> list[ir.Value]:
        offset = e.builder.mul(i, _I64(4))
        e.store(e.fma(e.load(b, offset), factors, e.load(a, offset)), out, offset)
        return []

    e.loop(count, LANES, [], body)


def _numba_type(kind: ir.Type) -> Any:
    return {_I64: types.int64, _F32: types.float32, ir.VoidType(): types.void}[kind]


def _emit_once(
    module: ir.Module, name: str, kinds: Sequence[ir.Type], emit: Callable[[_Emitter], None], result: ir.Type
) -> ir.Function:
    """The module's function of that name, written by `emit` if it is not there."""
    if name not in module.globals:
        emitter = _Emitter(module, name, kinds, result)
        emit(emitter)
        if not emitter.builder.block.is_terminated:
            emitter.builder.ret_void()
    return module.globals[name]


def _function(
    name: str, kinds: Sequence[ir.Type], emit: Callable[[_Emitter], None], result: ir.Type | None = None
) -> Any:
    """The numba intrinsic that calls the function that `emit` writes."""
    returned = ir.VoidType() if result is None else result
    signature = _numba_type(returned)(*map(_numba_type, kinds))

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.call(_emit_once(builder.module, name, kinds, emit, returned), args)
        return target.get_dummy_value() if result is None else value

    def typed(*_args: Any) -> Any:
        return signature, generate

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["context", *(f"argument{i}" for i in range(len(kinds)))]
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, positional) for n in names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    return emitted(typed)


def dot_tile(rows: int, cols: int, *, widen: bool) -> Any:
    """(row pointers, w, w stride, k, out, out stride): out[m, n] = Σ_k row_m[k] · w[n, k]; `widen`: w is bfloat16."""
    return _function(f"moiety_dot_{rows}_{cols}_{widen}", [_I64] * 6, partial(_dot, rows=rows, cols=cols, widen=widen))


def dot_tiles(cols: int, *, widen: bool) -> Any:
    """The same for a number of rows, up to TILE_ROWS, that is known only when it runs: the first argument."""
    kinds, void = [_I64] * 6, ir.VoidType()

    def choose(e: _Emitter) -> None:
        rows, *args = e.function.args
        builder = e.builder
        others = builder.append_basic_block()
        choice = builder.switch(rows, others)
        for m in range(1, TILE_ROWS + 1):
            emit = partial(_dot, rows=m, cols=cols, widen=widen)
            tile = _emit_once(e.module, f"moiety_dot_{m}_{cols}_{widen}", kinds, emit, void)
            block = builder.append_basic_block()
            choice.add_case(m, block)
            builder.position_at_end(block)
            builder.call(tile, args)
            builder.ret_void()
        builder.position_at_end(others)

    return _function(f"moiety_dots_{cols}_{widen}", [_I64, *kinds], choose)


def axpy_tile(rows: int, vectors: int) -> Any:
    """(p, p stride, v, v stride, count, out, out stride): out[m, :] += Σ_j p[m, j] · v[j, :]."""
    return _function(f"moiety_axpy_{rows}_{vectors}", [_I64] * 7, partial(_axpy, rows=rows, vectors=vectors))


widen_row = _function("moiety_widen", [_I64] * 3, _widen)
swiglu_row = _function("moiety_swiglu", [_I64] * 4, _swiglu)
softmax_step = _function("moiety_softmax", [_I64] * 3, _softmax, _F32)
scale_row = _function("moiety_scale", [_I64, _I64, _F32], _scale)
sum_squares = _function("moiety_sum_squares", [_I64] * 2, _sum_squares, _F32)
weigh_row = _function("moiety_weigh", [_I64, _I64, _F32, _I64, _I64], _weigh)
add_scaled_row = _function("moiety_add_scaled", [_I64, _I64, _I64, _F32, _I64], _add_scaled)
