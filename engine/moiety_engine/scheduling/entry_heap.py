"""A heap of sequences whose entries are voided instead of being searched for.

A sequence counts up its `entry` whenever it enters or leaves a policy's queue: what was pushed before is void from then
on. Void entries are dropped when they come up, and with many others when there are as many of them as of valid ones.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from moiety_engine.sequence import Sequence

Entry = tuple[Any, int, int, Sequence]  # (key, order of arrival, entry, sequence)

_SMALL = 64


class EntryHeap:
    """Smallest key first, ties by arrival. O(log n), amortised."""

    __slots__ = ("_compact_at", "_entries")

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._compact_at = _SMALL

    def __bool__(self) -> bool:
        """Whether anything is in it, be it void."""
        return bool(self._entries)

    def push(self, key: Any, sequence: Sequence) -> None:
        """Enter the sequence as it counts now."""
        entries = self._entries
        heappush(entries, (key, sequence.order, sequence.entry, sequence))
        if len(entries) > self._compact_at:
            entries[:] = [item for item in entries if item[2] == item[3].entry]
            heapify(entries)
            self._compact_at = max(_SMALL, 2 * len(entries))

    def first(self) -> Entry | None:
        """The first that is not void; it stays."""
        entries = self._entries
        while entries and entries[0][2] != entries[0][3].entry:
            heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Sequence | None:
        """The first that is not void, taken out."""
        if self.first() is None:
            return None
        sequence: Sequence = heappop(self._entries)[3]
        return sequence

    def pop_until(self, key: Any) -> Sequence | None:
        """The first that is not void, taken out if its key is not above this one."""
        first = self.first()
        return self.pop() if first is not None and first[0] <= key else None

    def rekey_first(self, key: Any) -> None:
        """The first, which `first` has shown, has this key now."""
        heapreplace(self._entries, (key, *self._entries[0][1:]))
