"""Emission of functions as LLVM IR with explicit vectors of LANES floats, callable from numba's kernels.

The code is explicit because results must not depend on the vectorizer: the result of one row is bit for bit the same
whatever rows are computed beside it. All addresses and strides are int64 bytes. Each function is emitted once into the
module that uses it.
"""

from __future__ import annotations

import inspect
import math
from typing import TYPE_CHECKING, Any

from llvmlite import ir
from numba.core import types

from moiety_kernels.cpu.compiling import emitted
from moiety_kernels.cpu.instructions import WIDE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

LANES = 16 if WIDE else 8

F32, VOID = ir.FloatType(), ir.VoidType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VF, VI16, VI32 = (ir.VectorType(kind, LANES) for kind in (F32, I16, I32))
PTR = ir.PointerType()


def constant(value: float) -> ir.Constant:
    """Return a vector with the value in every lane."""
    return ir.Constant(VF, [value] * LANES)


def _every(bits: int) -> ir.Constant:
    return ir.Constant(VI32, [bits] * LANES)


class Emitter:
    """Builder of one function: int64 and float arguments, straight-line code and loops over vectors."""

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
        return self.intrinsic(f"llvm.fma.v{LANES}f32", VF, [VF] * 3, a, b, c)

    def larger(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered(">", a, b), a, b)

    def smaller(self, a: ir.Value, b: ir.Value) -> ir.Value:
        return self.builder.select(self.builder.fcmp_ordered("<", a, b), a, b)

    def pointer(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        offset = I64(offset) if isinstance(offset, int) else offset
        return self.builder.inttoptr(self.builder.add(address, offset), PTR)

    def load(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        return self.builder.load(self.pointer(address, offset), typ=VF, align=4)

    def load_widened(self, address: ir.Value, offset: ir.Value) -> ir.Value:
        """Load LANES bfloat16 as float32: their bits are the upper half of the float's."""
        raw = self.builder.load(self.pointer(address, offset), typ=VI16, align=2)
        wide = self.builder.zext(raw, VI32)
        return self.builder.bitcast(self.builder.shl(wide, _every(16)), VF)

    def load_scalar(self, address: ir.Value, offset: ir.Value | int = 0) -> ir.Value:
        return self.builder.load(self.pointer(address, offset), typ=F32, align=4)

    def store(self, value: ir.Value, address: ir.Value, offset: ir.Value | int = 0) -> None:
        self.builder.store(value, self.pointer(address, offset), align=4)

    def store_narrowed(self, value: ir.Value, address: ir.Value, offset: ir.Value) -> None:
        """Store LANES floats as the nearest bfloat16, ties to even; NaN stays NaN."""
        builder = self.builder
        bits = builder.bitcast(value, VI32)
        odd = builder.and_(builder.lshr(bits, _every(16)), _every(1))
        rounded = builder.lshr(builder.add(bits, builder.add(odd, _every(0x7FFF))), _every(16))
        no_number = builder.fcmp_unordered("uno", value, value)
        narrow = builder.trunc(builder.select(no_number, _every(0x7FC0), rounded), VI16)
        builder.store(narrow, self.pointer(address, offset), align=2)

    def prefetch(self, address: ir.Value, offset: ir.Value, locality: int = 3) -> None:
        """Prefetch a cache line that will be read soon, into the L1 cache (3) or L2 cache (2)."""
        kinds = [PTR, I32, I32, I32]
        args = [self.pointer(address, offset), I32(0), I32(locality), I32(1)]
        self.intrinsic("llvm.prefetch.p0", VOID, kinds, *args)

    def splat(self, scalar: ir.Value) -> ir.Value:
        one = self.builder.insert_element(ir.Constant(VF, ir.Undefined), scalar, I32(0))
        return self.builder.shuffle_vector(one, one, ir.Constant(VI32, [0] * LANES))

    def loop_if_any(
        self, count: ir.Value, step: int, starts: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]
    ) -> list[ir.Value]:
        """Emit `loop`, or return `starts` unchanged where the count is 0."""
        builder, before = self.builder, self.builder.block
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        builder.cbranch(builder.icmp_signed(">", count, I64(0)), inside, after)
        builder.position_at_end(inside)
        results = self.loop(count, step, starts, body)
        end = builder.block
        builder.branch(after)
        builder.position_at_end(after)
        merged = []
        for start, result in zip(starts, results, strict=True):
            phi = builder.phi(start.type)
            phi.add_incoming(start, before)
            phi.add_incoming(result, end)
            merged.append(phi)
        return merged

    def loop(
        self, count: ir.Value, step: int, starts: Sequence[ir.Value], body: Callable[..., Sequence[ir.Value]]
    ) -> list[ir.Value]:
        """Emit `values = body(i, *values)` for i = 0, step, … < count, at least once; return the last values."""
        builder, before = self.builder, self.builder.block
        inside, after = self.function.append_basic_block(), self.function.append_basic_block()
        builder.branch(inside)
        builder.position_at_end(inside)
        index = builder.phi(I64)
        index.add_incoming(I64(0), before)
        carried = [builder.phi(start.type) for start in starts]
        for phi, start in zip(carried, starts, strict=True):
            phi.add_incoming(start, before)
        results = list(body(index, *carried))
        following = builder.add(index, I64(step))
        index.add_incoming(following, builder.block)
        for phi, value in zip(carried, results, strict=True):
            phi.add_incoming(value, builder.block)
        builder.cbranch(builder.icmp_signed("<", following, count), inside, after)
        builder.position_at_end(after)
        return results

    def lane_sums(self, vectors: Sequence[ir.Value]) -> ir.Value:
        """Return one vector whose lane i is the sum over the lanes of vectors[i], always added in the same tree."""
        level = [*vectors, *[constant(0.0)] * (LANES - len(vectors))]
        width = LANES
        while width > 1:
            half = width // 2
            low = [s + i for s in range(0, 2 * LANES, width) for i in range(half)]
            high = [lane + half for lane in low]
            level = [
                self.builder.fadd(
                    self.builder.shuffle_vector(a, b, ir.Constant(VI32, low)),
                    self.builder.shuffle_vector(a, b, ir.Constant(VI32, high)),
                )
                for a, b in zip(level[::2], level[1::2], strict=True)
            ]
            width = half
        return level[0]

    def transposed(self, rows: Sequence[ir.Value]) -> list[ir.Value]:
        """Return the columns of as many vectors as there are lanes, by rounds that swap blocks of half the size."""
        current, size = list(rows), LANES
        while size > 1:
            half = size // 2
            keep = [lane if lane % size < half else LANES + lane - half for lane in range(LANES)]
            swap = [lane + half if lane % size < half else LANES + lane for lane in range(LANES)]
            following = list(current)
            for row in (row for row in range(LANES) if row % size < half):
                upper, lower = current[row], current[row + half]
                following[row] = self.builder.shuffle_vector(upper, lower, ir.Constant(VI32, keep))
                following[row + half] = self.builder.shuffle_vector(upper, lower, ir.Constant(VI32, swap))
            current, size = following, half
        return current

    def reduce(self, vector: ir.Value, combine: Callable[[ir.Value, ir.Value], ir.Value]) -> ir.Value:
        """Combine all lanes in a fixed tree, with the result in every lane."""
        width = LANES
        while width > 1:
            width //= 2
            mask = ir.Constant(VI32, [lane ^ width for lane in range(LANES)])
            vector = combine(vector, self.builder.shuffle_vector(vector, vector, mask))
        return vector

    def exp(self, x: ir.Value) -> ir.Value:
        """Return e^x to about one unit in the last place; 0 below -87.3 (-inf included), x must not exceed 88."""
        builder = self.builder
        vanishes = builder.fcmp_ordered("<", x, constant(-87.3))
        x = self.larger(x, constant(-87.3))
        turns = self.intrinsic(f"llvm.rint.v{LANES}f32", VF, [VF], builder.fmul(x, constant(1 / math.log(2))))
        rest = self.fma(turns, constant(-0.693359375), x)
        rest = self.fma(turns, constant(2.12194440e-4), rest)
        poly = constant(1 / 5040)
        for divisor in (720, 120, 24, 6, 2, 1, 1):
            poly = self.fma(poly, rest, constant(1 / divisor))
        bits = builder.add(builder.fptosi(turns, VI32), ir.Constant(VI32, [127] * LANES))
        power = builder.bitcast(builder.shl(bits, ir.Constant(VI32, [23] * LANES)), VF)
        return builder.select(vanishes, constant(0.0), builder.fmul(poly, power))


def call_by_rows(e: Emitter, most: int, of_rows: Callable[[int], ir.Function]) -> None:
    """Emit (rows, …): a call of the function for that number of rows, 1 to `most`; other numbers do nothing."""
    rows, *args = e.function.args
    builder = e.builder
    end = builder.append_basic_block()
    choice = builder.switch(rows, end)
    for count in range(1, most + 1):
        block = builder.append_basic_block()
        choice.add_case(count, block)
        builder.position_at_end(block)
        builder.call(of_rows(count), args)
        builder.branch(end)
    builder.position_at_end(end)


def _numba_type(kind: ir.Type) -> Any:
    return {I64: types.int64, F32: types.float32, VOID: types.void}[kind]


def emit_once(
    module: ir.Module, name: str, kinds: Sequence[ir.Type], emit: Callable[[Emitter], None], result: ir.Type
) -> ir.Function:
    """Return the module's function of that name; `emit` writes it if it does not exist."""
    if name not in module.globals:
        emitter = Emitter(module, name, kinds, result)
        emit(emitter)
        if not emitter.builder.block.is_terminated:
            emitter.builder.ret_void()
    return module.globals[name]


def function(
    name: str, kinds: Sequence[ir.Type], emit: Callable[[Emitter], None], result: ir.Type | None = None
) -> Any:
    """Return the numba intrinsic that calls the function that `emit` writes."""
    returned = VOID if result is None else result
    signature = _numba_type(returned)(*map(_numba_type, kinds))

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        value = builder.call(emit_once(builder.module, name, kinds, emit, returned), args)
        return target.get_dummy_value() if result is None else value

    def typed(*_args: Any) -> Any:
        return signature, generate

    positional = inspect.Parameter.POSITIONAL_OR_KEYWORD
    names = ["context", *(f"argument{i}" for i in range(len(kinds)))]
    typed.__signature__ = inspect.Signature([inspect.Parameter(n, positional) for n in names])  # type: ignore[attr-defined]
    typed.__name__ = typed.__qualname__ = name
    return emitted(typed)
