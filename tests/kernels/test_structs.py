"""Structs that Python packs are read and written by compiled code field by field, and a mismatch is an error."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pytest
from numba import TypingError, njit

from moiety_kernels.cpu.memory import load_i64, store_i64
from moiety_kernels.cpu.structs import (
    Address,
    CacheLine,
    Float64,
    Int64,
    Int64x3,
    address_of_struct,
    layout_of,
    size_of,
    store_struct,
    struct_at,
)


class Inner(NamedTuple):
    first: Int64
    second: Float64


class Outer(NamedTuple):
    address: Address
    line: CacheLine
    inner: Inner
    widths: Int64x3
    last: Float64


def packed(values: tuple[object, ...]) -> np.ndarray:
    memory = np.zeros(32, dtype=np.int64)
    layout_of(type(values)).pack_into(memory.data, values)
    return memory


def test_fields_lie_in_order_and_nested_ones_inside() -> None:
    offsets = {name: field.offset for name, field in layout_of(Outer).fields.items()}
    assert offsets == {"address": 0, "line": 8, "inner": 72, "widths": 88, "last": 112}
    assert size_of(Outer) == 120


class Flat(NamedTuple):
    address: Address
    inner: Inner
    widths: Int64x3
    last: Float64


def test_compiled_code_reads_what_python_has_packed() -> None:
    memory = packed(Flat(address=7, inner=Inner(first=-3, second=0.5), widths=(4, 5, 6), last=2.25))

    @njit()
    def read(at: int) -> tuple[int, int, float, int, float]:
        flat = struct_at(Flat, at)
        return flat.address, flat.inner.first, flat.inner.second, load_i64(flat.widths, 2), flat.last

    assert read(memory.ctypes.data) == (7, -3, 0.5, 6, 2.25)


def test_compiled_code_writes_a_struct_inside_another() -> None:
    memory = np.zeros(32, dtype=np.int64)

    @njit()
    def write(at: int) -> int:
        outer = struct_at(Outer, at)
        store_struct(outer.inner, Inner(first=9, second=1.5))
        store_i64(outer.line, 0, 11)
        return address_of_struct(outer.inner) - at

    assert write(memory.ctypes.data) == 72
    assert (memory[1], memory[9], memory[10:11].view(np.float64)[0]) == (11, 9, 1.5)


def test_a_field_that_is_not_declared_fails_the_compilation() -> None:
    @njit()
    def read(at: int) -> int:
        return struct_at(Inner, at).third  # type: ignore[attr-defined]

    with pytest.raises(TypingError, match="third"):
        read(0)


def test_a_struct_with_a_missing_field_is_not_made() -> None:
    with pytest.raises(TypeError, match="second"):
        Inner(first=1)


class Wrong(NamedTuple):
    name: str


def test_a_field_without_a_c_type_has_no_layout() -> None:
    with pytest.raises(TypeError, match=r"Wrong\.name"):
        layout_of(Wrong)
