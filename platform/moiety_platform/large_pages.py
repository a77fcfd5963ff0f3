"""A process's own memory in large pages. What a request touches lies all over what the process has loaded and made;
with pages of 4 KiB the processor keeps looking up where, on a virtual machine through two tables, and the more so the
more others share its caches.

What is there is gathered (Linux 6.1's MADV_COLLAPSE); it stays where it is and as it is, and hardly more is taken from
the machine than before, since only what is in use is gathered. Where the system knows no such thing, or is told never
to, memory stays as it is.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import BinaryIO

FIRST_S, MOST_S = 5.0, 3600.0  # between two times; memory grows most in the beginning
LEAST_IN_USE = 0.9  # of a large page's memory, for it to be gathered: a thread's stack is mostly room

_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # of which Python's mmap names one
_SYSTEM = Path("/sys/kernel/mm/transparent_hugepage")
_IS_IN_USE = 1 << 63  # in an entry of /proc/self/pagemap
_ENTRY_BYTES = 8


@asynccontextmanager
async def gathered(pause_s: float = FIRST_S) -> AsyncIterator[int]:
    """Gather this process's memory now, and in a thread what is added later: after that pause, then ever more seldom,
    until this is left. How many bytes are in large pages now."""
    task = asyncio.create_task(_keep_gathering(pause_s), name="large-pages")
    try:
        yield gather()
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _keep_gathering(pause_s: float) -> None:
    while True:
        await asyncio.sleep(pause_s)
        await asyncio.to_thread(gather)
        pause_s = min(2 * pause_s, MOST_S)


def gather() -> int:
    """Have this process's memory in large pages, as far as it is in use and they fit into it; how many bytes are, now.
    Takes half a millisecond for each page, the first time."""
    size = _size() if sys.platform == "linux" else None
    if size is None:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    num_gathered = 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for begin, end in _own_memory():
            for address in range(-(-begin // size) * size, end // size * size, size):
                if _share_in_use(pagemap, address, size) >= LEAST_IN_USE:
                    madvise(address, size, _MADV_HUGEPAGE)  # so that it is one again should a part of it be given back
                    num_gathered += madvise(address, size, _MADV_COLLAPSE) == 0
    return num_gathered * size


def _size() -> int | None:
    """Of a large page, bytes; None where there are to be none."""
    try:
        is_never = "[never]" in (_SYSTEM / "enabled").read_text()
        return None if is_never else int((_SYSTEM / "hpage_pmd_size").read_text())
    except OSError:
        return None


def _own_memory() -> Iterator[tuple[int, int]]:
    """First and last address of what the process alone writes to, and no file stands behind."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, rights, _, _, _, *name = line.split(maxsplit=5)
        if rights == "rw-p" and (not name or name == ["[heap]"]):
            begin, end = addresses.split("-")
            yield int(begin, 16), int(end, 16)


def _share_in_use(pagemap: BinaryIO, address: int, size: int) -> float:
    page_bytes = os.sysconf("SC_PAGE_SIZE")
    num_pages = size // page_bytes
    entries = array("Q", os.pread(pagemap.fileno(), num_pages * _ENTRY_BYTES, address // page_bytes * _ENTRY_BYTES))
    return sum(entry >= _IS_IN_USE for entry in entries) / num_pages
