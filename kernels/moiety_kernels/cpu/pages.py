"""Large pages for memory that every step streams through.

With pages of 4 KiB, address translation takes about as long as reading the contents. Memory that is filled at start is
collapsed into large pages afterwards, in parallel with the rest of the start (Linux 6.1's MADV_COLLAPSE). Large pages
requested earlier come from memory that nothing has used yet, which the host of a virtual machine can take seconds to
provide; so they are requested earlier only where the first few arrive quickly. On a system without this support memory
stays as it is.
"""

from __future__ import annotations

import math
import statistics
import sys
import threading
import time
from typing import TYPE_CHECKING

from moiety_huge_pages.madvise import HUGE_PAGE_BYTES, advise, collapse

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

NEAR = 64 << 10  # largest gap in bytes between two tensors that may share a large page

_MADV_HUGEPAGE, _MADV_POPULATE_WRITE = 14, 23  # Python's mmap does not name the second
_NUM_TRIED_PAGES, _MAX_FILL_S = 7, 0.006  # pages to try, and the longest time for one; zeroing one takes 0.2 ms


def request_large_pages(tensors: Iterable[Tensor]) -> bool:
    """Request large pages for the memory of tensors that is about to be written for the first time.

    Return whether the request was made; if not, the memory comes in ordinary pages.
    """
    if not sys.platform.startswith("linux"):
        return False
    ranges = [(_up(begin), _down(end)) for begin, end in _ranges(tensors)]
    ranges = [(first, end) for first, end in ranges if first < end]
    tried = [(at, at + HUGE_PAGE_BYTES) for first, end in ranges for at in range(first, end, HUGE_PAGE_BYTES)][
        :_NUM_TRIED_PAGES
    ]
    if len(tried) < _NUM_TRIED_PAGES or statistics.median(_filled_s(*page) for page in tried) > _MAX_FILL_S:
        return False
    for first, end in ranges:
        advise(first, end - first, _MADV_HUGEPAGE)
    return True


def _filled_s(first: int, end: int) -> float:
    """Return the seconds until a page is present, with its contents kept; infinite if that cannot be measured."""
    begin_s = time.perf_counter()
    advise(first, end - first, _MADV_HUGEPAGE)
    failed = advise(first, end - first, _MADV_POPULATE_WRITE)
    return math.inf if failed else time.perf_counter() - begin_s


def collapse_into_large_pages(tensors: Iterable[Tensor]) -> threading.Thread | None:
    """Start to collapse the memory of CPU tensors into large pages; addresses and contents stay the same.

    Return the thread that does it, for callers that wait, or None if there is nothing to do.
    """
    ranges = [(_up(begin), _down(end)) for begin, end in _ranges(tensors) if _up(begin) < _down(end)]
    if not ranges or not sys.platform.startswith("linux"):
        return None
    thread = threading.Thread(target=_collapse, args=(ranges,), name="large-pages", daemon=True)
    thread.start()
    return thread


def _collapse(ranges: list[tuple[int, int]]) -> None:
    """Collapse each range with one call; one call per page takes three times as long.

    Failures are ignored: no system support, no contiguous memory, or memory that is freed by now.
    """
    for first, end in ranges:
        collapse(first, end - first)


def _ranges(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Return the first and last address of each contiguous memory range, in order."""
    ranges: list[tuple[int, int]] = []
    for begin, end in sorted((one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors if one.is_cpu):
        if ranges and begin <= ranges[-1][1] + NEAR:
            first, last = ranges.pop()
            ranges.append((first, max(last, end)))
        else:
            ranges.append((begin, end))
    return ranges


def _up(address: int) -> int:
    return -(-address // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES


def _down(address: int) -> int:
    return address // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
