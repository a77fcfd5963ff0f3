"""The system call that moves memory to huge pages."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

HUGE_PAGE_BYTES = 2 << 20  # on x86-64, and on Arm with pages of 4 KiB

_MADV_COLLAPSE = 25  # of linux/mman.h, since Linux 6.1; Python's mmap does not name it


def collapse(address: int, num_bytes: int) -> bool:
    """Move filled memory to huge pages, with its contents; return whether that succeeded.

    `address` and `num_bytes` are multiples of HUGE_PAGE_BYTES. It fails if the system does not support it, has no
    contiguous memory, or the memory is freed by now.
    """
    return advise(address, num_bytes, _MADV_COLLAPSE) == 0


def advise(address: int, num_bytes: int, advice: int) -> int:
    """Call `madvise`; return 0, or -1 if it failed. Linux only."""
    result: int = _madvise()(address, num_bytes, advice)
    return result


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
