"""Heap of sequences with lazy deletion: entries are voided instead of being searched for.

A sequence increments its `entry` whenever it enters or leaves a policy's queue, which voids all earlier heap entries.
Void entries are dropped when they reach the top, and all at once when they are as many as the valid ones.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush, heapreplace
from typing import Any

from moiety_engine.sequence import Sequence

Entry = tuple[Any, int, int, Sequence]  # (key, order of arrival, entry, sequence)

_SMALL = 64


class EntryHeap:
    """Heap with the smallest key first, ties by arrival. O(log n), amortised."""

    __slots__ = ("_compact_at", "entries")

    def __init__(self) -> None:
        self.entries: list[Entry] = []  # void ones included; callers read the first key
        self._compact_at = _SMALL

    def __bool__(self) -> bool:
        """Return whether the heap has entries, void ones included."""
        return bool(self.entries)

    def push(self, key: Any, sequence: Sequence) -> None:
        """Push the sequence with its current entry number."""
        entries = self.entries
        heappush(entries, (key, sequence.request.order, sequence.entry, sequence))
        if len(entries) > self._compact_at:
            entries[:] = [item for item in entries if item[2] == item[3].entry]
            heapify(entries)
            self._compact_at = max(_SMALL, 2 * len(entries))

    def first(self) -> Entry | None:
        """Return the first valid entry without removing it."""
        entries = self.entries
        while entries and entries[0][2] != entries[0][3].entry:
            heappop(entries)
        return entries[0] if entries else None

    def pop(self) -> Sequence | None:
        """Remove and return the first valid sequence."""
        return self.pop_until(None)

    def pop_until(self, key: Any) -> Sequence | None:
        """Remove and return the first valid sequence if its key is at most `key`; whatever its key is if that is None.

        Written out, since it is called several times for each sequence that a step examines.
        """
        entries = self.entries
        while entries:
            first_key, _, entry, sequence = entries[0]
            if entry != sequence.entry:
                heappop(entries)
            elif key is None or first_key <= key:
                heappop(entries)
                return sequence
            else:
                break
        return None

    def rekey_first(self, key: Any) -> None:
        """Change the key of the first entry. Call `first` before."""
        heapreplace(self.entries, (key, *self.entries[0][1:]))
