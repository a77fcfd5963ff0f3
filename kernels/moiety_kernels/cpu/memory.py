"""Raw memory for numba kernels: typed loads and stores at an address, atomics, and calls through a function's address.

Addresses are int64, element indices count elements. Nothing here checks bounds.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import types

from moiety_kernels.cpu.compiling import emitted

_FLOAT, _INT32, _INT64 = ir.FloatType(), ir.IntType(32), ir.IntType(64)


def _element(builder: ir.IRBuilder, element: ir.Type, address: ir.Value, index: ir.Value) -> ir.Value:
    """Return the pointer to element `index` of the array of `element` at `address`."""
    return builder.gep(builder.inttoptr(address, ir.PointerType()), [index], source_etype=element)


def _loader(element: ir.Type, result: types.Type, align: int) -> Any:
    def load(_context: Any, _address: Any, _index: Any) -> Any:
        def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load(_element(builder, element, *args), typ=element, align=align)

        return result(types.int64, types.int64), generate

    return emitted(load)


def _storer(element: ir.Type, kind: types.Type, align: int) -> Any:
    def store(_context: Any, _address: Any, _index: Any, _value: Any) -> Any:
        def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store(args[2], _element(builder, element, args[0], args[1]), align=align)
            return target.get_dummy_value()

        return types.void(types.int64, types.int64, kind), generate

    return emitted(store)


load_f32 = _loader(_FLOAT, types.float32, 4)
load_i32 = _loader(_INT32, types.int32, 4)
load_i64 = _loader(_INT64, types.int64, 8)
store_f32 = _storer(_FLOAT, types.float32, 4)
store_i32 = _storer(_INT32, types.int32, 4)
store_i64 = _storer(_INT64, types.int64, 8)


@emitted
def acquire_i64(_context: Any, _address: Any) -> Any:
    """Load with acquire ordering."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8, typ=_INT64)

    return types.int64(types.int64), generate


@emitted
def release_i64(_context: Any, _address: Any, _value: Any) -> Any:
    """Store with release ordering."""

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return target.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@emitted
def fetch_add_i64(_context: Any, _address: Any, _value: Any) -> Any:
    """Add atomically and return the old value."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _INT64.as_pointer()), args[1], "acq_rel")

    return types.int64(types.int64, types.int64), generate


@emitted
def compare_swap_i64(_context: Any, _address: Any, _expected: Any, _value: Any) -> Any:
    """Store `value` if the current value is `expected`; return whether it was."""

    def generate(_target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pointer = builder.inttoptr(args[0], _INT64.as_pointer())
        return builder.extract_value(builder.cmpxchg(pointer, args[1], args[2], "acq_rel", "acquire"), 1)

    return types.boolean(types.int64, types.int64, types.int64), generate


@emitted
def call_task(_context: Any, _function: Any, _args: Any, _task: Any, _scratch: Any) -> Any:
    """Call the task function at an address: void (int64 args, int64 task, int64 scratch)."""

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 3)
        function = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(function, args[1:])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 4), generate


@emitted
def call_driver(
    _context: Any, _driver: Any, _state: Any, _scratch: Any, _function: Any, _args: Any, _num_tasks: Any
) -> Any:
    """Call the driver at an address: void (int64 state, scratch, function, args, num_tasks)."""

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 5)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 6), generate


@emitted
def call_product(
    _context: Any, _function: Any, _rows: Any, _m: Any, _w: Any, _other_w: Any, _n: Any, _k: Any,
    _out: Any, _other_out: Any, _out_stride: Any, _scratch: Any,
) -> Any:  # fmt: skip
    """Call the product at an address (`products.py`): void (10 int64 arguments)."""

    def generate(target: Any, builder: Any, _signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [_INT64] * 10)
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), args[1:])
        return target.get_dummy_value()

    return types.void(*[types.int64] * 11), generate


@emitted
def yield_core(_context: Any) -> Any:
    """Yield the core to another thread that wants it (POSIX sched_yield)."""

    def generate(target: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        name = "sched_yield"
        known = builder.module.globals.get(name)
        function = known or ir.Function(builder.module, ir.FunctionType(_INT32, []), name)
        builder.call(function, [])
        return target.get_dummy_value()

    return types.void(), generate
