"""Lists within statements, in few lengths: a statement of every length that comes along is one more to be prepared,
which takes time, and to be kept so by every connection, which takes memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Value = TypeVar("Value")


def evened(values: Iterable[Value]) -> list[Value]:
    """The values, the last one repeated until there are 2^n or 3 · 2^n of them; for where once more changes nothing."""
    found = list(values)
    size = 1
    while size < len(found):
        size = size * 4 // 3 if size % 3 == 0 else max(size + 1, size * 3 // 2)
    return found + found[-1:] * (size - len(found))
