"""Limits that the kernel enforces on a forked process: memory, processor time, elapsed time, and its parent's life."""

from __future__ import annotations

import ctypes
import math
import os
import resource
import signal
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from moiety_limited_processes.frames import EXIT_CRASHED, EXIT_OUT_OF_MEMORY

PR_SET_PDEATHSIG = 1  # of prctl(2)
PR_SET_DUMPABLE = 4
PR_SET_NO_NEW_PRIVS = 38
MAX_OPEN_FILES = 64


def run_to_exit(work: Callable[[], None]) -> NoReturn:
    """Do the work of a child, and end the process with the exit code that tells its owner of an error."""
    code = EXIT_CRASHED
    try:
        end_with_parent()
        null = os.open(os.devnull, os.O_RDWR)
        os.dup2(null, 2)  # error output of native code may quote a client's text or file
        work()
        code = 0
    except EOFError:
        code = 0  # the owner is gone
    except MemoryError:
        code = EXIT_OUT_OF_MEMORY
    except BaseException:
        code = EXIT_CRASHED
    finally:
        os._exit(code)


def end_with_parent() -> None:
    """Die with the template, which alone can report to the owner how a child ended."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(EXIT_CRASHED)


def limit_memory(more_bytes: int) -> None:
    """Limit further growth of the address space to `more_bytes`, and disable core files."""
    limit_bytes = _memory_pages()[0] * resource.getpagesize() + more_bytes
    _, hard_bytes = resource.getrlimit(resource.RLIMIT_AS)
    if hard_bytes != resource.RLIM_INFINITY:
        limit_bytes = min(limit_bytes, hard_bytes)
    resource.setrlimit(resource.RLIMIT_AS, (limit_bytes, limit_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def limit_time(cpu_s: float, wall_s: float) -> None:
    """End this process after so much processor time, or elapsed time, even in native code."""
    hard_s = math.ceil(cpu_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (hard_s, hard_s))  # in case the timer fails
    signal.setitimer(signal.ITIMER_PROF, cpu_s)  # the default action of its signal ends the process
    signal.setitimer(signal.ITIMER_REAL, wall_s)


def limit_access() -> None:
    """Let this process write no file, open few, gain no privilege by a program, and be traced by no other process.

    A limit of the number of processes does not hold for root, so there is none. Raises OSError.
    """
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(MAX_OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    zero = ctypes.c_ulong(0)
    for option, value in ((PR_SET_NO_NEW_PRIVS, 1), (PR_SET_DUMPABLE, 0)):
        if prctl(option, ctypes.c_ulong(value), zero, zero, zero):
            raise OSError(ctypes.get_errno(), f"prctl({option}) fails")


def limit_child(*, niceness: int, memory_bytes: int, cpu_s: float, wall_s: float) -> None:
    """Apply all limits to a child before its work, and let it yield to other processes. Raises OSError."""
    os.nice(niceness)
    limit_memory(memory_bytes)
    limit_time(cpu_s, wall_s)
    limit_access()


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return _memory_pages()[1] * resource.getpagesize()


def _memory_pages() -> tuple[int, int]:
    """Return this process's pages: address space and resident memory."""
    fields = Path("/proc/self/statm").read_text().split()
    return int(fields[0]), int(fields[1])
