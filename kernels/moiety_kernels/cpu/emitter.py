"""Emission of functions as LLVM IR with explicit vectors of LANES floats, callable from numba's kernels.

The code is explicit because results must not depend on the vectorizer: the result of one row is bit for bit the same
whatever rows are computed beside it. All addresses and strides are int64 bytes. Each function is emitted once into the
module that uses it. `docs/cpu-kernels.md` teaches the notation.

A function is emitted by a Python function whose first argument is the `Emitter`; the others declare, by name and class
of `values.py`, the arguments of the emitted function. An argument may also be a NamedTuple of them. Keyword-only
arguments are those of the emission.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple, get_type_hints

from llvmlite import ir
from numba.core import types
from numba.core.errors import TypingError
from numba.extending import intrinsic

from moiety_kernels.cpu.values import (
    F32,
    I64,
    LANES,
    VF,
    VOID,
    Array,
    EmittedFunction,
    Float,
    Int,
    Mask,
    Value,
    Vector,
    constant_of,
)


class Emitter(EmittedFunction):
    """Builder of one function: straight-line code and loops over vectors."""

    def constant(self, value: float | Sequence[float], kind: ir.Type = VF) -> Vector:
        """Return a constant vector; one number is in every lane."""
        return Vector(self, constant_of(kind, value))

    def int64(self, value: int) -> Int:
        return Int(self, I64(value))

    def fma(self, a: Vector, b: Vector | float, c: Vector | float) -> Vector:
        """Return a · b + c, rounded once."""
        operands = [a.ir, a._operand(b), a._operand(c)]
        return Vector(self, self.intrinsic(f"llvm.fma.v{LANES}f32", VF, [VF] * 3, *operands))

    def rounded(self, x: Vector) -> Vector:
        """Return the nearest integers, ties to even, as floats."""
        return Vector(self, self.intrinsic(f"llvm.rint.v{LANES}f32", VF, [VF], x.ir))

    def larger(self, a: Vector, b: Vector) -> Vector:
        return (a > b).choose(a, b)

    def smaller(self, a: Vector, b: Vector) -> Vector:
        return (a < b).choose(a, b)

    def splat(self, scalar: Float | Vector) -> Vector:
        """Return a vector with the number in every lane."""
        return scalar.in_every_lane()

    def loop(self, count: Int, step: int, carried: list[Vector] | None = None) -> Iterator[Int]:
        """Emit a loop over i = 0, step, … < count, with at least one iteration: `for i in e.loop(…): body`.

        The body is emitted once. An iteration finds in the list `carried` the values that the one before has left
        there; after the loop it holds the last ones.
        """
        carried = [] if carried is None else carried
        builder, before = self.builder, self.builder.block
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        phis = [builder.phi(start.ir.type) for start in carried]
        for number, (phi, start) in enumerate(zip(phis, carried, strict=True)):
            phi.add_incoming(start.ir, before)
            carried[number] = Vector(self, phi)
        yield Int(self, index)
        following = builder.add(index, I64(step))
        index.add_incoming(following, builder.block)
        for phi, value in zip(phis, carried, strict=True):
            phi.add_incoming(value.ir, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count.ir), inside, after)
        builder.position_at_end(after)

    def loop_if_any(self, count: Int, step: int, carried: list[Vector] | None = None) -> Iterator[Int]:
        """Emit `loop`, without an iteration where the count is 0."""
        carried = [] if carried is None else carried
        builder, before, starts = self.builder, self.builder.block, list(carried)
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        builder.cbranch((count > 0).ir, inside, after)
        builder.position_at_end(inside)
        yield from self.loop(count, step, carried)
        end = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        for number, (start, result) in enumerate(zip(starts, list(carried), strict=True)):
            phi = builder.phi(start.ir.type)
            phi.add_incoming(start.ir, before)
            phi.add_incoming(result.ir, end)
            carried[number] = Vector(self, phi)

    def if_(self, condition: Mask) -> AbstractContextManager[Any]:
        """Emit the code of the context where the condition holds."""
        manager: AbstractContextManager[Any] = self.builder.if_then(condition.ir)
        return manager

    @contextmanager
    def switch(self, value: Int) -> Iterator[Callable[[int], AbstractContextManager[None]]]:
        """Emit `with e.switch(value) as case: with case(number): body`; other numbers do nothing."""
        builder = self.builder
        end = builder.append_basic_block()
        choice = builder.switch(value.ir, end)

        @contextmanager
        def case(number: int) -> Iterator[None]:
            block = builder.append_basic_block()
            choice.add_case(I64(number), block)
            builder.position_at_end(block)
            yield
            builder.branch(end)

        yield case
        builder.position_at_end(end)

    def lane_sums(self, vectors: Sequence[Vector]) -> Vector:
        """Return one vector whose lane i is the sum over the lanes of vectors[i], always added in the same tree."""
        level = [*vectors, *[self.constant(0.0)] * (LANES - len(vectors))]
        width = LANES
        while width > 1:
            half = width // 2
            low = [s + i for s in range(0, 2 * LANES, width) for i in range(half)]
            high = [lane + half for lane in low]
            level = [a.shuffled(b, low) + a.shuffled(b, high) for a, b in zip(level[::2], level[1::2], strict=True)]
            width = half
        return level[0]

    def store_lane_sums(
        self, sums_MN: Sequence[Vector], cols: int, out: Array, out_stride: Int, scales: Vector | None = None
    ) -> None:
        """Emit out[m, n] = (sum over the lanes of sums[m, n]) · scales, for `cols` columns.

        `scales` holds the columns' scales, again and again.
        """
        together = LANES // cols  # rows whose sums fill one vector
        num_rows = len(sums_MN) // cols
        for first in range(0, num_rows, together):
            some = min(together, num_rows - first)
            totals = self.lane_sums(sums_MN[first * cols : (first + some) * cols])
            if scales is not None:
                totals = totals * scales
            for m in range(some):
                part = totals.lanes([m * cols + n for n in range(cols)])
                out.moved(out_stride * (first + m))[0] = part

    def transposed(self, rows: Sequence[Vector]) -> list[Vector]:
        """Return the columns of as many vectors as there are lanes, by rounds that swap blocks of half the size."""
        current, size = list(rows), LANES
        while size > 1:
            half = size // 2
            keep = [lane if lane % size < half else LANES + lane - half for lane in range(LANES)]
            swap = [lane + half if lane % size < half else LANES + lane for lane in range(LANES)]
            following = list(current)
            for row in (row for row in range(LANES) if row % size < half):
                upper, lower = current[row], current[row + half]
                following[row], following[row + half] = upper.shuffled(lower, keep), upper.shuffled(lower, swap)
            current, size = following, half
        return current

    def reduce(self, vector: Vector, combine: Callable[[Vector, Vector], Vector]) -> Vector:
        """Combine all lanes in a fixed tree, with the result in every lane."""
        width = LANES
        while width > 1:
            width //= 2
            vector = combine(vector, vector.lanes([lane ^ width for lane in range(LANES)]))
        return vector

    def sum(self, vector: Vector) -> Float:
        """Return the sum over the lanes, always added in the same tree."""
        return self.reduce(vector, lambda a, b: a + b).lane(0)

    def exp(self, x: Vector) -> Vector:
        """Return e^x to about one unit in the last place; 0 below -87.3 (-inf included), x must not exceed 88."""
        vanishes = x < -87.3
        x = self.larger(x, self.constant(-87.3))
        turns = self.rounded(x * (1 / math.log(2)))
        rest = self.fma(turns, -0.693359375, x)
        rest = self.fma(turns, 2.12194440e-4, rest)
        poly = self.constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            poly = self.fma(poly, rest, 1 / divisor)
        power = ((turns.to_int32s() + 127) << 23).as_(VF)
        return vanishes.choose(self.constant(0.0), poly * power)


class Parameter(NamedTuple):
    """Argument of an emitted function."""

    name: str
    declared: type[Value] | type[Array]


def _is_struct(declared: Any) -> bool:
    return isinstance(declared, type) and issubclass(declared, tuple) and hasattr(declared, "_fields")


def parameters_of(emit: Callable[..., Any]) -> list[Parameter]:
    """Return the arguments that a Python function declares for the function that it emits."""
    return [Parameter(name, declared) for name, declared in _flat(_declared(emit))]


def _declared(emit: Callable[..., Any]) -> dict[str, Any]:
    plain = emit.func if isinstance(emit, functools.partial) else emit
    hints = get_type_hints(plain)
    _, *names = [
        name
        for name, parameter in inspect.signature(plain).parameters.items()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    return {name: hints[name] for name in names}


def _flat(declared: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, kind in declared.items():
        if _is_struct(kind):
            yield from _flat(get_type_hints(kind))
        elif isinstance(kind, type) and issubclass(kind, (Value, Array)) and kind.kind is not None:
            yield name, kind
        else:
            raise TypeError(f"the argument {name!r} is declared as {kind}, which no emitted function takes")


def _result_of(emit: Callable[..., Any]) -> ir.Type:
    plain = emit.func if isinstance(emit, functools.partial) else emit
    returned = get_type_hints(plain).get("return")
    return VOID if returned in (None, type(None)) else returned.kind


def emit_once(module: ir.Module, name: str, emit: Callable[..., Value | None]) -> ir.Function:
    """Return the module's function of that name; `emit` writes it if it does not exist."""
    if name not in module.globals:
        parameters = parameters_of(emit)
        emitter = Emitter(module, name, [parameter.declared.kind for parameter in parameters], _result_of(emit))
        values = iter(emitter.function.args)

        def argument(kind: Any) -> Any:
            if _is_struct(kind):
                return kind(*(argument(field) for field in get_type_hints(kind).values()))
            return kind(emitter, next(values))

        result = emit(emitter, *(argument(kind) for kind in _declared(emit).values()))
        if result is None:
            emitter.builder.ret_void()
        else:
            emitter.builder.ret(result.ir)
    return module.globals[name]


def call(e: Emitter, function: ir.Function, *args: Value | Array | tuple[Any, ...]) -> None:
    """Emit a call of an emitted function."""

    def flat(args: tuple[Any, ...]) -> Iterator[ir.Value]:
        for arg in args:
            if isinstance(arg, tuple):
                yield from flat(arg)
            else:
                yield arg.address.ir if isinstance(arg, Array) else arg.ir

    e.builder.call(function, list(flat(args)))


def call_by_rows(
    e: Emitter, num_rows: Int, most: int, of_rows: Callable[[int], ir.Function], args: tuple[Any, ...]
) -> None:
    """Emit a call of the function for that number of rows, 1 to `most`; other numbers do nothing."""
    with e.switch(num_rows) as case:
        for rows in range(1, most + 1):
            with case(rows):
                call(e, of_rows(rows), *args)


_COMPILED = {I64: types.int64, F32: types.float32, VOID: types.void}  # numba's types


def function(name: str, emit: Callable[..., Value | None], *, is_there: bool = True) -> Any:
    """Return the function that `emit` writes, for calls in compiled code, by position or by name.

    Unless `is_there`, the CPU lacks its instructions: it is empty or 0, as it would not compile, and is never called.
    """
    parameters = parameters_of(emit)
    kinds = [_COMPILED[parameter.declared.kind] for parameter in parameters]
    result = _result_of(emit)
    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = [inspect.Parameter(parameter.name, positional) for parameter in parameters]
    by_name = inspect.Signature(names)
    signature = _COMPILED[result](*kinds).replace(pysig=by_name)  # type: ignore[no-untyped-call]

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        if not is_there:
            return target.get_dummy_value() if result == VOID else ir.Constant(result, 0)
        value = builder.call(emit_once(builder.module, name, emit), args)
        return target.get_dummy_value() if result == VOID else value

    def typed(_context: Any, *args: Any, **named: Any) -> Any:
        try:
            by_name.bind(*args, **named)
        except TypeError as exc:
            raise TypingError(f"{name}{by_name}: {exc}") from exc
        return signature, generate

    context = inspect.Parameter("context", positional)
    typed.__signature__ = inspect.Signature([context, *names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    return intrinsic(typed)
