"""Structs in memory that Python writes and compiled kernels read, each declared once as a NamedTuple.

The annotation of a field is its C type: one of those below, or another struct. From the declaration come the packing in
Python (`StructLayout`) and, in compiled code, the fields as attributes of the first argument of a task or of
`struct_at`. A field that does not exist or is missing is an error of mypy, and of the compilation.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, Protocol, TypeAlias, TypeVar, cast, get_type_hints

from llvmlite import ir
from numba.core import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import infer_getattr, intrinsic, lower_getattr_generic, models, register_model

if TYPE_CHECKING:
    from torch import Tensor


class CType(NamedTuple):
    """C type of a field; compiled code reads the field, or gets the address of one that is stored `in_place`."""

    code: str  # of Python's `struct`
    element: ir.Type
    compiled: types.Type
    in_place: bool = False


_INT64, _POINTER = ir.IntType(64), ir.PointerType()
Address: TypeAlias = Annotated[int, CType("q", _INT64, types.int64)]
Int64: TypeAlias = Annotated[int, CType("q", _INT64, types.int64)]
Float64: TypeAlias = Annotated[float, CType("d", ir.DoubleType(), types.float64)]
CacheLine: TypeAlias = Annotated[int, CType("8q", _INT64, types.int64, in_place=True)]  # an int64 alone in its line
Int64x3: TypeAlias = Annotated[tuple[int, int, int], CType("3q", _INT64, types.int64, in_place=True)]

Struct: TypeAlias = tuple[Any, ...]  # an instance of a declaration, which is a NamedTuple
S = TypeVar("S", bound=Struct)


class Field(NamedTuple):
    """Place of a field in its struct, in bytes, and its C type or the struct that it is."""

    offset: int
    kind: CType | type[Struct]


class StructLayout:
    """Layout of a declared struct: the place of each field, and the packing of an instance."""

    def __init__(self, declaration: type[Struct]) -> None:
        self.fields: dict[str, Field] = {}
        code, offset = "=", 0
        for name, kind in _kinds(declaration):
            part: str = layout_of(kind).code if isinstance(kind, type) else kind.code
            self.fields[name] = Field(offset, kind)
            code, offset = code + part, offset + struct.calcsize("=" + part)
        self.code: str = code.removeprefix("=")
        self._packing = struct.Struct(code)
        self.num_bytes = offset
        self._parts = [one.kind for one in self.fields.values()]
        self._flatten: Callable[[Struct], Struct] | None = None
        if any(isinstance(kind, type) or kind.in_place for kind in self._parts):
            # compiled, as `namedtuple` compiles its constructors: every launch of a kernel waits for this
            self._flatten = eval(f"lambda values: ({self._flat_items('values')},)")

    def pack_into(self, memory: Any, values: Struct) -> None:
        """Write an instance to the start of `memory`."""
        flatten = self._flatten
        self._packing.pack_into(memory, 0, *(values if flatten is None else flatten(values)))

    def _flat_items(self, name: str) -> str:
        """Return an expression for the items of the tuple `name` with those of inner structs in their places.

        An inner struct without inner structs of its own is taken as it is, like the values of a field `in_place`.
        """
        items = []
        for index, kind in enumerate(self._parts):
            item = f"{name}[{index}]"
            if isinstance(kind, type) and layout_of(kind)._flatten is not None:
                item = layout_of(kind)._flat_items(item)
            elif isinstance(kind, type) or kind.in_place:
                item = f"*{item}"
            items.append(item)
        return ", ".join(items)


def _kinds(declaration: type[Struct]) -> Iterator[tuple[str, CType | type[Struct]]]:
    hints = get_type_hints(declaration, include_extras=True)
    for name, hint in hints.items():
        marks = [mark for mark in getattr(hint, "__metadata__", ()) if isinstance(mark, CType)]
        if marks:
            yield name, marks[0]
        elif isinstance(hint, type) and issubclass(hint, tuple) and hasattr(hint, "_fields"):
            yield name, hint
        else:
            raise TypeError(f"{declaration.__name__}.{name} is {hint}, which is neither a C type nor a struct")


@functools.cache
def layout_of(declaration: type[Struct]) -> StructLayout:
    """Return the layout of a declared struct."""
    return StructLayout(declaration)


def size_of(declaration: type[Struct]) -> int:
    """Return the size of a declared struct in bytes."""
    return layout_of(declaration).num_bytes


def address_of(tensor: Tensor | None) -> int:
    """Return the address of a tensor's first element, or 0 if there is no tensor."""
    return 0 if tensor is None else tensor.data_ptr()


class StructAt(types.Type):
    """numba's type of the address of a declared struct, whose attributes are the fields."""

    def __init__(self, declaration: type[Struct]) -> None:
        self.declaration = declaration
        super().__init__(f"StructAt({declaration.__module__}.{declaration.__qualname__})")

    @property
    def key(self) -> type[Struct]:
        return self.declaration


@register_model(StructAt)
class _AddressModel(models.PrimitiveModel):
    def __init__(self, manager: Any, kind: StructAt) -> None:
        super().__init__(manager, kind, _INT64)  # type: ignore[no-untyped-call]


@infer_getattr
class _FieldTypes(AttributeTemplate):
    key = StructAt

    def generic_resolve(self, at: StructAt, name: str) -> types.Type | None:  # type: ignore[override]
        field = layout_of(at.declaration).fields.get(name)
        if field is None:
            return None
        return StructAt(field.kind) if isinstance(field.kind, type) else field.kind.compiled


@lower_getattr_generic(StructAt)  # type: ignore[no-untyped-call, untyped-decorator]
def _read_field(_target: Any, builder: ir.IRBuilder, at: StructAt, address: ir.Value, name: str) -> ir.Value:
    offset, kind = layout_of(at.declaration).fields[name]
    if isinstance(kind, type) or kind.in_place:
        return builder.add(address, _INT64(offset))
    return _load(builder, kind, address, offset)


def _element(builder: ir.IRBuilder, kind: CType, address: ir.Value, offset: int) -> ir.Value:
    return builder.gep(builder.inttoptr(address, _POINTER), [_INT64(offset // 8)], source_etype=kind.element)


def _load(builder: ir.IRBuilder, kind: CType, address: ir.Value, offset: int) -> ir.Value:
    return builder.load(_element(builder, kind, address, offset), typ=kind.element, align=8)


class _StructAtFunction(Protocol):
    def __call__(self, declaration: type[S], address: int) -> S: ...


class _AddressFunction(Protocol):
    def __call__(self, values: Struct) -> int: ...


class _StoreStructFunction(Protocol):
    def __call__(self, address: int | Struct, values: Struct) -> None: ...


def _struct_at(_context: Any, declaration: Any, _address: Any) -> Any:
    def generate(_target: Any, _builder: Any, _signature: Any, args: Any) -> Any:
        return args[1]

    return StructAt(declaration.instance_class)(declaration, types.int64), generate


def _address_of_struct(_context: Any, at: Any) -> Any:
    def generate(_target: Any, _builder: Any, _signature: Any, args: Any) -> Any:
        return args[0]

    return types.int64(at), generate


def _store_struct(_context: Any, address: Any, values: Any) -> Any:
    fields = []
    for name, (offset, kind) in layout_of(values.instance_class).fields.items():
        if isinstance(kind, type) or kind.in_place:
            raise TypeError(f"{values.instance_class.__name__}.{name} can be written by Python alone")
        fields.append((offset, kind))

    def generate(target: Any, builder: Any, signature: Any, args: Any) -> Any:
        for index, (offset, kind) in enumerate(fields):
            value = builder.extract_value(args[1], index)
            value = target.cast(builder, value, signature.args[1].types[index], kind.compiled)
            builder.store(value, _element(builder, kind, args[0], offset), align=8)
        return target.get_dummy_value()

    return types.void(address, values), generate


# In compiled code, the struct at an address: a field is read where it is used.
struct_at = cast("_StructAtFunction", intrinsic(_struct_at))
# In compiled code, the address of such a struct, for instance of one inside another.
address_of_struct = cast("_AddressFunction", intrinsic(_address_of_struct))
# In compiled code, write an instance of a declared struct to an address.
store_struct = cast("_StoreStructFunction", intrinsic(_store_struct))
