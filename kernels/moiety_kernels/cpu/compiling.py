"""Compilation of the CPU kernels: by numba, without the GIL, cached on disk.

numba's cache is beside the package, or in the user's cache folder where the package is read-only.

A job's function is a *task*: (args, task, scratch) → None, where `args` are the job's arguments, a declared struct
(`structs.py`) that is passed by its address, `task` is the task's number and `scratch` the address of the thread's own
memory.
"""

from __future__ import annotations

import contextlib
import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import llvmlite.binding as llvm
from numba import cfunc, config, njit, types
from numba.extending import intrinsic

from moiety_kernels.cpu.code_cache import locked, use_cache
from moiety_kernels.cpu.compile_progress import progress
from moiety_kernels.cpu.structs import S, StructAt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

llvm.initialize_native_asmparser()  # for code with instructions by name, also where other processes compiled it

F = TypeVar("F", bound="Callable[..., Any]")


class _TaskAddressFunction(Protocol):
    def __call__(self, task: Callable[[S, int, int], None], arguments: type[S]) -> int: ...


def jit(function: F) -> F:
    """Compile on the first call, or load from the cache."""
    return cast("F", njit(nogil=True, cache=use_cache(), error_model="numpy")(function))


def inlined_jit(function: F) -> F:
    """Compile into each function that calls it. Its arguments may be emitted functions; it is not cached by itself."""
    return cast("F", njit(nogil=True, error_model="numpy")(function))


def emitted(function: Callable[..., Any]) -> Any:
    """Return an intrinsic that writes its own LLVM code."""
    return intrinsic(function)


@functools.cache
def driver_address(driver: Callable[[int, int, int, int, int], None]) -> int:
    """Return the address of the machine code of a jitted driver (state, scratch, function, args, num_tasks) → None."""
    return _address(driver.py_func, *[types.int64] * 5)  # type: ignore[attr-defined]


def function_address(function: Callable[..., None], num_args: int) -> int:
    """Return the address of the machine code of a function of so many int64 arguments. The first call compiles it."""
    return _address(function, *[types.int64] * num_args)


@functools.cache
def _task_address(task: Callable[..., None], arguments: type[tuple[Any, ...]]) -> int:
    """Return the address of the machine code of a task with these arguments.

    The first call compiles it or loads it from the cache.
    """
    return _address(task, StructAt(arguments), *[types.int64] * 2)


task_address = cast("_TaskAddressFunction", _task_address)  # the cache alone has no generic types


@functools.cache
def _address(function: Callable[..., None], *arguments: types.Type) -> int:
    with _one_process_compiles(function):
        kernel = cfunc(types.void(*arguments), cache=use_cache(), error_model="numpy")(function)
    if not kernel.cache_hits:
        progress.add()
    _KEPT.append(kernel)
    address = kernel.address
    assert address is not None
    return int(address)


@contextlib.contextmanager
def _one_process_compiles(function: Callable[..., None]) -> Iterator[None]:
    """Let one process of this machine compile a function; the others wait, and load it from the cache.

    Ranks and engines that start together would each compile every kernel. Where there is no cache, or its file system
    has no locks, each does.
    """
    if not use_cache():
        yield
        return
    with locked(Path(config.CACHE_DIR) / f"{function.__module__}.{function.__qualname__}.lock"):  # type: ignore[attr-defined]
        yield


_KEPT: list[Any] = []  # keeps the owners of compiled code alive
