"""Huge pages for the memory of a process that lives long.

A request touches objects all over the memory of its process. With pages of 4 KiB the processor looks up many addresses
in page tables, twice in a virtual machine. Linux can move filled memory to pages of 2 MiB on request (`MADV_COLLAPSE`,
since Linux 6.1), where the operator has not disabled transparent huge pages. Nothing happens on other systems.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import structlog

from moiety_huge_pages.madvise import HUGE_PAGE_BYTES, collapse

FILLED_PART = 0.75  # of a mapping, from which huge pages need little more memory than small ones
MAX_RANGE_BYTES = 4 << 30  # of a range that is moved; moving a gigabyte takes about 0.3 s
COLLAPSE_AFTER_S = (0.0, 60.0, 600.0)  # pauses before each round, since memory is filled while requests are served
BUSY_SHARE = 0.2  # of the time of a round: a request that needs a page waits while it is moved, 1 to 8 ms

_MOVED_S = 1e-4  # seconds of a call that moves a page; where the page is huge already, it takes a microsecond
_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_MAPPINGS = Path("/proc/self/smaps")
_HEAD = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S{4}) \S+ \S+ (\d+)\s*(.*)")

log = structlog.get_logger(__name__)


def start_using_huge_pages(pauses_s: Sequence[float] = COLLAPSE_AFTER_S) -> threading.Thread | None:
    """Move filled memory to huge pages in a thread, after each of the pauses. Return the thread, None without one."""
    if not are_huge_pages_allowed():
        return None
    thread = threading.Thread(target=_use_huge_pages, args=(pauses_s,), name="huge-pages", daemon=True)
    thread.start()
    return thread


def are_huge_pages_allowed(switch: Path = _SWITCH) -> bool:
    """Return whether the system has transparent huge pages and its operator has not disabled them."""
    try:
        return sys.platform == "linux" and "[never]" not in switch.read_text()
    except OSError:
        return False


def filled_ranges(mappings: str) -> Iterator[tuple[int, int]]:
    """Yield the address and the length of each range of whole huge pages in private memory that is mostly filled.

    `mappings` has the format of `/proc/self/smaps`. Stacks, files and ranges above MAX_RANGE_BYTES are left out.
    """
    begin = end = 0
    for line in mappings.splitlines():
        if (head := _HEAD.fullmatch(line)) is not None:
            is_private_memory = head[3] == "rw-p" and head[4] == "0" and head[5] in ("", "[heap]")
            begin, end = (int(head[1], 16), int(head[2], 16)) if is_private_memory else (0, 0)
        elif line.startswith("Rss:") and int(line.split()[1]) * 1024 >= FILLED_PART * (end - begin):
            first = -(-begin // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
            last = end // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            if 0 < last - first <= MAX_RANGE_BYTES:
                yield first, last - first


def collapse_memory(busy_share: float = 1.0) -> int:
    """Move the filled memory of this process to huge pages, and return the number of bytes that now have them.

    Pages are moved during `busy_share` of the time that this takes. Raises OSError if the system hides the mappings.
    """
    num_bytes = 0
    for address, length in filled_ranges(_MAPPINGS.read_text()):
        for page in range(address, address + length, HUGE_PAGE_BYTES):
            begin_s = time.monotonic()
            num_bytes += HUGE_PAGE_BYTES * collapse(page, HUGE_PAGE_BYTES)
            took_s = time.monotonic() - begin_s
            if busy_share < 1 and took_s > _MOVED_S:
                time.sleep(took_s / busy_share - took_s)
    return num_bytes


def use_huge_pages_now() -> int:
    """Move memory as `start_using_huge_pages` does, once and without pauses; return the bytes that have huge pages."""
    try:
        return collapse_memory() if are_huge_pages_allowed() else 0
    except OSError as error:
        log.debug("huge_pages_not_used", error=str(error))
        return 0


def _use_huge_pages(pauses_s: Sequence[float]) -> None:
    for pause_s in pauses_s:
        time.sleep(pause_s)
        try:
            num_bytes = collapse_memory(BUSY_SHARE)
        except OSError as error:
            log.debug("huge_pages_not_used", error=str(error))
            return
        log.debug("huge_pages_used", num_bytes=num_bytes)
