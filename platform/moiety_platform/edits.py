"""Detection of edits during a read, whose result may then be older than the edit."""

from __future__ import annotations

from collections.abc import Hashable

MAX_REMEMBERED = 1_000


class Edits:
    """Counter of the edits that this process makes.

    Take `now` before reading; then ask `since` whether a thing was edited after it. Forgets the oldest edits, and then
    returns True where it does not know.
    """

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
