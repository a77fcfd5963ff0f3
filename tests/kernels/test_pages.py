"""Tensors in large pages keep their contents and addresses; if the system provides large pages, they are in some."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from moiety_huge_pages.madvise import HUGE_PAGE_BYTES
from moiety_kernels.cpu.pages import collapse_into_large_pages, request_large_pages

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
gives_large_pages = pytest.mark.skipif(
    not sys.platform.startswith("linux")
    or tuple(map(int, platform.release().split(".")[:2])) < (6, 1)
    or not SETTING.exists()
    or "[never]" in SETTING.read_text(),
    reason="this system gives no large pages, or cannot gather them",
)


def in_large_pages(tensor: Tensor) -> int:
    """Bytes in large pages of the mappings in which the tensor lies."""
    found, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            begin, end = (int(part, 16) for part in first.split("-"))
            inside = begin < tensor.data_ptr() + tensor.nbytes and end > tensor.data_ptr()
        elif inside and first == "AnonHugePages:":
            found += int(rest.split()[0]) << 10
    return found


def test_tensors_moved_to_huge_pages_keep_their_addresses_and_values() -> None:
    tensors = [torch.arange(count, dtype=torch.int64) for count in (3, 1 << 17, 1 << 20, 70_001)]
    before = [(one.data_ptr(), one.clone()) for one in tensors]
    gathering = collapse_into_large_pages(tensors)
    if gathering is not None:
        gathering.join(60)
        assert not gathering.is_alive()
    for one, (address, values) in zip(tensors, before, strict=True):
        assert one.data_ptr() == address
        assert torch.equal(one, values)


def test_less_than_a_large_page_is_left_alone() -> None:
    assert collapse_into_large_pages([torch.zeros(HUGE_PAGE_BYTES // 8)]) is None


@gives_large_pages
def test_memory_is_in_large_pages_once_it_is_gathered() -> None:
    filled = torch.ones(8 * HUGE_PAGE_BYTES, dtype=torch.uint8)
    gathering = collapse_into_large_pages([filled])
    if gathering is not None:
        gathering.join(60)
    assert gathering is None or in_large_pages(filled) >= HUGE_PAGE_BYTES


def test_memory_that_is_to_come_in_large_pages_keeps_what_it_has() -> None:
    tensors = [torch.arange(count, dtype=torch.int64) for count in (3, 1 << 20, 1 << 22)]
    before = [one.clone() for one in tensors]
    request_large_pages(tensors)
    assert all(torch.equal(one, values) for one, values in zip(tensors, before, strict=True))


def test_large_pages_are_not_asked_for_where_few_would_be_needed() -> None:
    assert not request_large_pages([torch.empty(2 * HUGE_PAGE_BYTES, dtype=torch.uint8)])
