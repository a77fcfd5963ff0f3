"""Compilation of the CPU kernels: by numba, without the GIL, cached on disk.

numba's cache is beside the package, or in the user's cache folder where the package is read-only.

A job's function is a *task*: (args, task, scratch) → None, where `args` are the job's arguments, a declared struct
(`structs.py`) that is passed by its address, `task` is the task's number and `scratch` the address of the thread's own
memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import hashlib
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from numba import cfunc, config, njit, types
from numba.extending import intrinsic

from moiety_kernels.cpu.compile_progress import progress
from moiety_kernels.cpu.instructions import ARM, ARM_FEATURE, EMULATED
from moiety_kernels.cpu.structs import S, StructAt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

F = TypeVar("F", bound="Callable[..., Any]")


class _TaskAddressFunction(Protocol):
    def __call__(self, task: Callable[[S, int, int], None], arguments: type[S]) -> int: ...


def jit(function: F) -> F:
    """Compile on the first call, or load from the cache."""
    return cast("F", njit(nogil=True, cache=_cacheable(), error_model="numpy")(function))


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
        kernel = cfunc(types.void(*arguments), cache=_cacheable(), error_model="numpy")(function)
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
    if not _cacheable():
        yield
        return
    name = f"{function.__module__}.{function.__qualname__}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # as of a full disk, or of another user's file
            file = stack.enter_context((Path(config.CACHE_DIR) / name).open("w"))  # type: ignore[attr-defined]
            fcntl.flock(file, fcntl.LOCK_EX)
            stack.callback(fcntl.flock, file, fcntl.LOCK_UN)  # closing is not enough where a child was forked meanwhile
        yield


@functools.cache
def _cacheable() -> bool:
    """Point numba at a folder for compiled code; return whether there is one. Without it, every start recompiles.

    The folder's name holds a digest of all sources: numba itself checks only the file of the function that it compiles,
    not the files of the functions called from there.
    """
    package = Path(__file__).parent.parent
    kinds = EMULATED | ({ARM_FEATURE} if ARM else set())  # of code; numba knows the features of the compiler
    digest = hashlib.sha256(",".join(sorted(kinds)).encode())
    for path in sorted(package.rglob("*.py")):
        digest.update(path.read_bytes())
    for parent in (package / "__pycache__", Path("~/.cache/moiety")):
        try:
            folder = parent.expanduser() / f"kernels-{digest.hexdigest()[:16]}"
            folder.mkdir(parents=True, exist_ok=True)
        except (OSError, RuntimeError):  # read-only, or the user has no home
            continue
        if os.access(folder, os.W_OK):
            config.CACHE_DIR = str(folder)  # type: ignore[attr-defined]
            return True
    return False


_KEPT: list[Any] = []  # keeps the owners of compiled code alive
