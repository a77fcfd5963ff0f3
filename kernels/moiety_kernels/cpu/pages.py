"""Memory in large pages, for what every step streams through: with pages of 4 KiB, looking up where they are takes
about as long as reading what they hold. Knows nothing of what that is.

What is filled at the start is gathered into large pages afterwards, beside what else a start does (Linux 6.1's
MADV_COLLAPSE): asked for before, they come from memory that nothing has used yet, which the host of a virtual machine
can take seconds to provide. So they are asked for before only where the first few are there soon. Where the system
knows no such thing, memory stays as it is.
"""

from __future__ import annotations

import ctypes
import functools
import math
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

LARGE_PAGE = 2 << 20  # bytes, on x86-64, and on ARM with pages of 4 KiB
NEAR = 64 << 10  # bytes between two tensors that may share a large page

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE, _MADV_COLLAPSE = 14, 23, 25  # the last two Python's mmap does not name
_TRIED, _SOON_S = 7, 0.006  # pages, and what one may take; zeros are written to one in 0.2 ms


def prefer(tensors: Iterable[Tensor]) -> bool:
    """Have the memory of tensors, which is about to be written for the first time, come in large pages, if the system
    has some at hand. False: it comes as ever."""
    if not sys.platform.startswith("linux"):
        return False
    ranges = [(_up(begin), _down(end)) for begin, end in _ranges(tensors)]
    ranges = [(first, end) for first, end in ranges if first < end]
    tried = [(at, at + LARGE_PAGE) for first, end in ranges for at in range(first, end, LARGE_PAGE)][:_TRIED]
    if len(tried) < _TRIED or statistics.median(_filled_s(*page) for page in tried) > _SOON_S:
        return False
    for first, end in ranges:
        _madvise()(first, end - first, _MADV_HUGEPAGE)
    return True


def _filled_s(first: int, end: int) -> float:
    """Seconds that a page takes to be there, whose content stays; for ever where that cannot be told."""
    begin_s = time.perf_counter()
    _madvise()(first, end - first, _MADV_HUGEPAGE)
    failed = _madvise()(first, end - first, _MADV_POPULATE_WRITE)
    return math.inf if failed else time.perf_counter() - begin_s


def enlarge(tensors: Iterable[Tensor]) -> threading.Thread | None:
    """Begin to gather the memory of tensors on the CPU, which stays where it is and as it is, into large pages. Returns
    the thread that does it, for whoever wants to wait; None where there is nothing to do."""
    ranges = [(_up(begin), _down(end)) for begin, end in _ranges(tensors) if _up(begin) < _down(end)]
    if not ranges or not sys.platform.startswith("linux"):
        return None
    thread = threading.Thread(target=_gather, args=(ranges,), name="large-pages", daemon=True)
    thread.start()
    return thread


def _gather(ranges: list[tuple[int, int]]) -> None:
    """What fails is no loss: a system without it, no memory in one piece, or memory that is gone by now. One call a
    range: with one a page it takes three times as long."""
    for first, end in ranges:
        _madvise()(first, end - first, _MADV_COLLAPSE)


def _ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """First and last address of memory that belongs together, in order."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.is_cpu):
        if ranges and begin <= ranges[-1][1] + NEAR:
            first, last = ranges.pop()
            ranges.append((first, max(last, end)))
        else:
            ranges.append((begin, end))
    return ranges


def _up(address: int) -> int:
    return -(-address // LARGE_PAGE) * LARGE_PAGE


def _down(address: int) -> int:
    return address // LARGE_PAGE * LARGE_PAGE


@functools.cache
def _madvise() -> Any:
    function = ctypes.CDLL(None).madvise
    function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return function
