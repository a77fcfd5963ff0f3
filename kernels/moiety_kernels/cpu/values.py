"""Notation of emitted code: values with operators, and arrays in memory with an index.

An operation on a value emits its instruction, so `out[i] = row[i] * factor` emits a load, a multiplication and a store.
A Python number beside a value is a constant of the value's type, in every lane. Integers are signed in comparisons and
`to_floats`, and unsigned in `>>`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Self, TypeVar

from llvmlite import ir

from moiety_kernels.cpu.instructions import WIDE

LANES = 16 if WIDE else 8  # floats of a vector

F32, VOID = ir.FloatType(), ir.VoidType()
I8, I16, I32, I64 = (ir.IntType(bits) for bits in (8, 16, 32, 64))
VF, VI16, VI32 = (ir.VectorType(kind, LANES) for kind in (F32, I16, I32))
PTR = ir.PointerType()

V = TypeVar("V", bound="Value")
A = TypeVar("A", bound="Array")


def constant_of(kind: ir.Type, value: float | Sequence[float]) -> ir.Constant:
    """Return a constant; one number stands for all lanes of a vector."""
    if not isinstance(kind, ir.VectorType):
        return ir.Constant(kind, value)
    numbers = list(value) if isinstance(value, Sequence) else [value] * kind.count
    return ir.Constant(kind, [float(number) for number in numbers] if kind.element == F32 else numbers)


class EmittedFunction:
    """Function of an LLVM module to which instructions are appended."""

    def __init__(self, module: ir.Module, name: str, kinds: Sequence[ir.Type], result: ir.Type) -> None:
        self.module = module
        self.function = ir.Function(module, ir.FunctionType(result, list(kinds)), name)
        self.function.linkage = "internal"
        self.function.attributes.add("noinline")
        self.builder = ir.IRBuilder(self.function.append_basic_block())

    def intrinsic(self, name: str, result: ir.Type, kinds: Sequence[ir.Type], *args: ir.Value) -> ir.Value:
        """Emit a call of LLVM's intrinsic of that name."""
        known = self.module.globals.get(name)
        function = known or ir.Function(self.module, ir.FunctionType(result, list(kinds)), name)
        return self.builder.call(function, args)


class Value:
    """Value of emitted code, the result of an instruction of the function `e`."""

    kind: ClassVar[ir.Type | None] = None  # of a function's argument of this class

    def __init__(self, e: EmittedFunction, value: ir.Value) -> None:
        self.e, self.ir = e, value

    @property
    def _is_float(self) -> bool:
        kind = self.ir.type
        return bool((kind.element if isinstance(kind, ir.VectorType) else kind) == F32)

    def _operand(self, other: Value | float) -> ir.Value:
        return other.ir if isinstance(other, Value) else constant_of(self.ir.type, other)

    def in_every_lane(self) -> Vector:
        """Return a vector with this number in every lane."""
        kind = ir.VectorType(self.ir.type, LANES)
        first_lane = self.e.builder.insert_element(ir.Constant(kind, ir.Undefined), self.ir, I32(0))
        return Vector(self.e, first_lane).lanes([0] * LANES)

    def _emit(self, integer: str, floating: str, other: Value | float) -> Self:
        name = floating if self._is_float else integer
        return type(self)(self.e, getattr(self.e.builder, name)(self.ir, self._operand(other)))

    def __add__(self, other: Self | float) -> Self:
        return self._emit("add", "fadd", other)

    def __mul__(self, other: Self | float) -> Self:
        return self._emit("mul", "fmul", other)

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Self | float) -> Self:
        return self._emit("sub", "fsub", other)

    def __truediv__(self, other: Self | float) -> Self:
        return self._emit("", "fdiv", other)

    def __rsub__(self, other: float) -> Self:
        return type(self)(self.e, self._operand(other)) - self

    def __rtruediv__(self, other: float) -> Self:
        return type(self)(self.e, self._operand(other)) / self

    def __neg__(self) -> Self:
        return 0 - self

    def __and__(self, other: Self | int) -> Self:
        return self._emit("and_", "", other)

    def __or__(self, other: Self | int) -> Self:
        return self._emit("or_", "", other)

    def __lshift__(self, bits: Self | int) -> Self:
        return self._emit("shl", "", bits)

    def __rshift__(self, bits: Self | int) -> Self:
        return self._emit("lshr", "", bits)

    def _compare(self, relation: str, other: Value | float) -> Mask:
        builder = self.e.builder
        compare = builder.fcmp_ordered if self._is_float else builder.icmp_signed
        return Mask(self.e, compare(relation, self.ir, self._operand(other)))

    def __lt__(self, other: Self | float) -> Mask:
        return self._compare("<", other)

    def __gt__(self, other: Self | float) -> Mask:
        return self._compare(">", other)

    def __ge__(self, other: Self | float) -> Mask:
        return self._compare(">=", other)

    def equals(self, other: Self | float) -> Mask:
        return self._compare("==", other)

    def differs(self, other: Self | float) -> Mask:
        return self._compare("!=", other)

    def unordered(self, relation: str, other: Self | float) -> Mask:
        """Compare floats; true where one of them is NaN."""
        return Mask(self.e, self.e.builder.fcmp_unordered(relation, self.ir, self._operand(other)))

    def is_nan(self) -> Mask:
        return self.unordered("uno", self)


class Int(Value):
    """An int64."""

    kind = I64

    def to_int32s(self) -> Vector:
        """Return a vector with the lower 32 bits in every lane."""
        return self.truncated(I32).in_every_lane()

    def truncated(self, kind: ir.Type) -> Vector:
        """Return the lower bits."""
        return Vector(self.e, self.e.builder.trunc(self.ir, kind))


class Float(Value):
    """A float32."""

    kind = F32


class Vector(Value):
    """A vector of floats or integers, of LANES lanes unless it says otherwise."""

    def as_(self, kind: ir.Type) -> Vector:
        """Return the same bits as another type."""
        return Vector(self.e, self.e.builder.bitcast(self.ir, kind))

    def to_floats(self) -> Vector:
        return Vector(self.e, self.e.builder.sitofp(self.ir, VF))

    def to_int32s(self) -> Vector:
        return Vector(self.e, self.e.builder.fptosi(self.ir, VI32))

    def extended(self, kind: ir.Type, *, signed: bool) -> Vector:
        """Return the integers as wider ones."""
        extend = self.e.builder.sext if signed else self.e.builder.zext
        return Vector(self.e, extend(self.ir, kind))

    def truncated(self, kind: ir.Type) -> Vector:
        """Return the lower bits of the integers."""
        return Vector(self.e, self.e.builder.trunc(self.ir, kind))

    def shuffled(self, other: Vector, lanes: Sequence[int]) -> Vector:
        """Return chosen lanes of both, those of `other` numbered after those of this one."""
        order = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return Vector(self.e, self.e.builder.shuffle_vector(self.ir, other.ir, order))

    def lanes(self, numbers: Sequence[int]) -> Vector:
        return self.shuffled(self, numbers)

    def lane(self, number: int) -> Float:
        return Float(self.e, self.e.builder.extract_element(self.ir, I32(number)))


class Mask(Value):
    """Result of a comparison, in each lane."""

    def choose(self, true: V, false: V | float) -> V:
        """Return `true` where the comparison holds, else `false`."""
        return type(true)(self.e, self.e.builder.select(self.ir, true.ir, true._operand(false)))


class Array:
    """Elements in memory, from an int64 address on; a load or store takes the elements from an index on."""

    kind: ClassVar[ir.Type] = I64
    element_bytes: ClassVar[int] = 1
    vector: ClassVar[ir.Type] = ir.VectorType(I8, LANES)  # that an index loads

    def __init__(self, e: EmittedFunction, address: ir.Value) -> None:
        self.e, self.address = e, Int(e, address)

    def offset(self, index: Int | int) -> Int | int:
        """Return the bytes before the element."""
        return index if self.element_bytes == 1 else index * self.element_bytes

    def pointer(self, index: Int | int = 0) -> ir.Value:
        return self.e.builder.inttoptr((self.address + self.offset(index)).ir, PTR)

    def load(self, index: Int | int, kind: ir.Type) -> Vector:
        """Load a vector of that type from element `index` on."""
        align = self.element_bytes
        return Vector(self.e, self.e.builder.load(self.pointer(index), typ=kind, align=align))

    def __getitem__(self, index: Int | int) -> Vector:
        return self.load(index, self.vector)

    def __setitem__(self, index: Int | int, value: Value) -> None:
        self.e.builder.store(value.ir, self.pointer(index), align=self.element_bytes)

    def moved(self, num_bytes: Int | int) -> Self:
        """Return the array that starts `num_bytes` later."""
        return type(self)(self.e, (self.address + num_bytes).ir)

    def as_(self, kind: type[A]) -> A:
        """Return the same memory as elements of another type."""
        return kind(self.e, self.address.ir)

    def rows(self, stride: Int, count: int) -> list[Self]:
        """Return `count` arrays that start `stride` bytes from each other."""
        return [self.moved(stride * row) for row in range(count)]

    def prefetch(self, index: Int | int, locality: int = 3) -> None:
        """Prefetch the cache line of an element, into the L1 cache (3) or L2 cache (2)."""
        args = self.pointer(index), I32(0), I32(locality), I32(1)
        self.e.intrinsic("llvm.prefetch.p0", VOID, [PTR, I32, I32, I32], *args)


class Bytes(Array):
    """Bytes, or memory whose contents have more than one type."""


class Floats(Array):
    """Elements of float32."""

    element_bytes = 4
    vector = VF

    def scalar(self, index: Int | int = 0) -> Float:
        return Float(self.e, self.e.builder.load(self.pointer(index), typ=F32, align=4))


class BFloats(Array):
    """Elements of bfloat16, loaded as float32: their bits are the upper half of the float's."""

    element_bytes = 2
    vector = VI16

    def __getitem__(self, index: Int | int) -> Vector:
        return (self.load(index, VI16).extended(VI32, signed=False) << 16).as_(VF)

    def __setitem__(self, index: Int | int, value: Value) -> None:
        """Store floats as the nearest bfloat16, ties to even; NaN stays NaN."""
        floats = Vector(self.e, value.ir)
        bits = floats.as_(VI32)
        odd = (bits >> 16) & 1
        rounded = (bits + (odd + 0x7FFF)) >> 16
        nan = Vector(self.e, constant_of(VI32, 0x7FC0))
        super().__setitem__(index, floats.is_nan().choose(nan, rounded).truncated(VI16))


class Pairs(Array):
    """Elements of bfloat16, two to a lane of int32."""

    element_bytes = 2
    vector = VI32


class Int16s(Array):
    """Elements of int16."""

    element_bytes = 2
    vector = VI16


class Addresses(Array):
    """Addresses of arrays, as int64."""

    element_bytes = 8

    def arrays(self, count: int, kind: type[A]) -> list[A]:
        """Load the first `count` addresses."""
        builder = self.e.builder
        return [kind(self.e, builder.load(self.pointer(i), typ=I64, align=8)) for i in range(count)]
