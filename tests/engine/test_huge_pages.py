"""Huge pages of a process: which memory gets them, and where nothing happens."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import pytest

from moiety_huge_pages import process_memory
from moiety_huge_pages.madvise import HUGE_PAGE_BYTES
from moiety_huge_pages.process_memory import (
    MAX_RANGE_BYTES,
    are_huge_pages_allowed,
    collapse_memory,
    filled_ranges,
    start_using_huge_pages,
)

KIB = 1024


def _mapping(begin: int, num_bytes: int, filled_bytes: int, kind: str = "rw-p", inode: int = 0, name: str = "") -> str:
    head = f"{begin:x}-{begin + num_bytes:x} {kind} 00000000 00:00 {inode}                  {name}".rstrip()
    lines = (head, f"Size: {num_bytes // KIB} kB", f"Rss: {filled_bytes // KIB} kB", "VmFlags: rd wr mr mw me ac")
    return "\n".join(lines) + "\n"


def test_whole_huge_pages_of_filled_private_memory_are_chosen() -> None:
    begin = 7 * HUGE_PAGE_BYTES + 4 * KIB
    mappings = _mapping(begin, 4 * HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES) + _mapping(
        40 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES, name="[heap]"
    )
    assert list(filled_ranges(mappings)) == [
        (8 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES),
        (40 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES),
    ]


@pytest.mark.parametrize(
    "mapping",
    [
        pytest.param(_mapping(0, 4 * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES), id="the stack of a thread, mostly empty"),
        pytest.param(_mapping(0, 4 * HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES, name="[stack]"), id="the stack"),
        pytest.param(_mapping(0, 4 * HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES, "r-xp", 7, "/lib/a.so"), id="a program"),
        pytest.param(_mapping(0, 4 * HUGE_PAGE_BYTES, 4 * HUGE_PAGE_BYTES, "rw-s"), id="shared memory"),
        pytest.param(_mapping(0, MAX_RANGE_BYTES + HUGE_PAGE_BYTES, MAX_RANGE_BYTES + HUGE_PAGE_BYTES), id="too large"),
        pytest.param(_mapping(4 * KIB, HUGE_PAGE_BYTES, HUGE_PAGE_BYTES), id="less than a whole huge page"),
    ],
)
def test_other_memory_keeps_its_pages(mapping: str) -> None:
    assert list(filled_ranges(mapping)) == []


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has these pages")
def test_the_kernels_switch_decides(tmp_path: Path) -> None:
    switch = tmp_path / "enabled"
    assert not are_huge_pages_allowed(switch), "the system has none"
    switch.write_text("always madvise [never]\n")
    assert not are_huge_pages_allowed(switch)
    switch.write_text("always [madvise] never\n")
    assert are_huge_pages_allowed(switch)


@pytest.mark.skipif(not are_huge_pages_allowed(), reason="this system has no transparent huge pages")
def test_memory_keeps_its_content() -> None:
    with mmap.mmap(-1, 4 * HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        pattern = bytes(range(256)) * 16
        for at in range(0, len(memory), len(pattern)):
            memory[at : at + len(pattern)] = pattern
        num_bytes = collapse_memory()
        assert num_bytes % HUGE_PAGE_BYTES == 0  # 0 where the kernel refuses
        assert all(memory[at : at + len(pattern)] == pattern for at in range(0, len(memory), len(pattern)))


@pytest.mark.skipif(not are_huge_pages_allowed(), reason="this system has no transparent huge pages")
def test_the_thread_ends_after_its_rounds() -> None:
    thread = start_using_huge_pages(pauses_s=(0.0, 0.0))
    assert thread is not None
    thread.join(60)
    assert not thread.is_alive()


def test_a_round_beside_requests_pauses_after_each_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    mappings = tmp_path / "smaps"
    mappings.write_text(_mapping(0, 3 * HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES))
    now_s, moved, pauses = [0.0], [], list[float]()

    def collapse(address: int, num_bytes: int) -> bool:
        moved.append((address, num_bytes))
        now_s[0] += 0.004 if address else 0.0  # the first page is huge already
        return True

    monkeypatch.setattr(process_memory, "_MAPPINGS", mappings)
    monkeypatch.setattr(process_memory, "collapse", collapse)
    monkeypatch.setattr("moiety_huge_pages.process_memory.time.monotonic", lambda: now_s[0])
    monkeypatch.setattr("moiety_huge_pages.process_memory.time.sleep", pauses.append)
    assert collapse_memory(0.2) == 3 * HUGE_PAGE_BYTES
    assert moved == [(number * HUGE_PAGE_BYTES, HUGE_PAGE_BYTES) for number in range(3)]
    assert pauses == [pytest.approx(0.016)] * 2
