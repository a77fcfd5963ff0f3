"""What is gathered into large pages stays as it is; room that nobody uses stays room."""

from __future__ import annotations

import asyncio
import mmap
import platform
import sys
from pathlib import Path

import pytest

from moiety_platform.large_pages import gather, gathered

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1)
    or not SETTING.exists()
    or "[never]" in SETTING.read_text(),
    reason="this system gives no large pages, or cannot gather them",
)
SIZE = 32 << 20


def total(field: str) -> int:
    """Bytes of this process, by the system's name for what is counted."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return int(next(line for line in lines if line.startswith(f"{field}:")).split()[1]) * 1024


def test_memory_in_use_lies_in_large_pages_and_is_as_it_was() -> None:
    filled = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for page in range(SIZE // mmap.PAGESIZE):
        filled[page * mmap.PAGESIZE] = 1 + page % 255
    before = total("AnonHugePages")
    num_bytes = gather()
    assert total("AnonHugePages") >= before + SIZE // 2
    assert num_bytes >= SIZE // 2
    assert all(filled[page * mmap.PAGESIZE] == 1 + page % 255 for page in range(SIZE // mmap.PAGESIZE))
    filled.close()


def test_room_that_nobody_uses_stays_room() -> None:
    gather()
    room = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    room[:: 64 * mmap.PAGESIZE] = bytes([1]) * (SIZE // 64 // mmap.PAGESIZE)  # a few of each large page's
    before = total("Rss")
    gather()
    assert total("Rss") < before + SIZE // 4
    assert room[64 * mmap.PAGESIZE] == 1
    room.close()


async def test_what_is_filled_later_is_gathered_as_well() -> None:
    async with gathered(pause_s=0.01):
        filled = mmap.mmap(-1, SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        before = total("AnonHugePages")
        filled[:: mmap.PAGESIZE] = bytes([1]) * (SIZE // mmap.PAGESIZE)
        async with asyncio.timeout(60):
            while total("AnonHugePages") < before + SIZE // 2:  # noqa: ASYNC110 - the kernel sets no event
                await asyncio.sleep(0.01)
    filled.close()
