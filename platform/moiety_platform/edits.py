"""Which things were edited while something was being read: what was read of those may be older than the edit."""

from __future__ import annotations

from collections.abc import Hashable

MAX_REMEMBERED = 1_000


class Edits:
    """Counts the edits that this process makes. Take `now` before reading; then ask whether `since` it a thing was
    edited. Forgets the oldest, and then says yes where it does not know."""

    def __init__(self) -> None:
        self.now = 0
        self._of: dict[Hashable, int] = {}
        self._known_from = 0

    def note(self, thing: Hashable) -> None:
        self.now += 1
        if len(self._of) >= MAX_REMEMBERED:
            self._of.clear()
            self._known_from = self.now - 1
        self._of[thing] = self.now

    def since(self, moment: int, thing: Hashable) -> bool:
        return self._of.get(thing, 0) > moment or moment < self._known_from
