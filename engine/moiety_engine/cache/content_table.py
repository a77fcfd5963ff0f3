"""Table of the contents that the tiers of a prefix cache hold: hashes, and the numbers by which the tiers name them.

All tiers of a cache share one table, so that contents that move between them keep their number, and no tier needs a
hash table of its own. Removed copies are counted later, by `count_removed`: until then the table may have contents
that no tier holds any longer.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

MAX_UNCOUNTED = 4096  # removed copies; a scheduler counts them after each launch
NOWHERE = -1  # block of contents that a tier does not hold, and number of the contents of a block without any


class ContentListener(Protocol):
    """Receiver of the changes of a table; see PrefixChangeLog."""

    def store(self, block_hash: bytes) -> None:
        """Record contents that the table did not have."""
        ...

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        """Record contents that the table no longer has."""
        ...


class ContentTable:
    """Owner of the numbers. Single-threaded, like the pools that share it."""

    def __init__(self) -> None:
        self.changes: ContentListener | None = None  # told of contents that the first tier stores or the last removes
        self.numbers: dict[bytes, int] = {}  # by hash; callers read it
        self.hash_of: list[bytes] = []  # by number, also of numbers that are not used any longer; callers read it
        self._num_copies: list[int] = []  # by number: tiers that hold the contents, before `_removed` is counted
        self._removed: list[int] = []  # numbers of the contents of which a tier has removed its copy
        self._unused: list[int] = []  # numbers that had contents
        self._tiers: list[list[int]] = []  # the blocks with the contents, by number

    def add_tier(self) -> list[int]:
        """Return the list of a new tier's blocks by number, NOWHERE at first. The table extends it."""
        blocks = [NOWHERE] * len(self.hash_of)
        self._tiers.append(blocks)
        return blocks

    def add(self, block_hash: bytes) -> int:
        """Return a number for contents that the table does not have, and of which a tier stores a copy."""
        if self._unused:
            number = self._unused.pop()
            self.hash_of[number], self._num_copies[number] = block_hash, 1
        else:
            number = len(self.hash_of)
            self.hash_of.append(block_hash)
            self._num_copies.append(1)
            for blocks in self._tiers:
                blocks.append(NOWHERE)
        self.numbers[block_hash] = number
        if self.changes is not None:
            self.changes.store(block_hash)
        return number

    def hashes_of(self, numbers: Iterable[int]) -> list[bytes]:
        """Return the hashes of the contents with these numbers."""
        hash_of = self.hash_of
        return [hash_of[number] for number in numbers]

    def add_copy(self, number: int) -> None:
        """Record that a tier stores another copy of contents that the table has."""
        self._num_copies[number] += 1

    def remove_copies(self, numbers: Iterable[int]) -> None:
        """Record that a tier no longer holds these contents; it takes effect with `count_removed`.

        Call it when no tier names the removed copies any longer. Many are counted at once.
        """
        self._removed += numbers
        if len(self._removed) > MAX_UNCOUNTED:
            self.count_removed()

    def count_removed(self) -> None:
        """Delete the contents that no tier holds any longer."""
        copies, hash_of, numbers, unused = self._num_copies, self.hash_of, self.numbers, self._unused
        gone = []
        for number in self._removed:
            copies[number] = num_left = copies[number] - 1
            if not num_left:
                block_hash = hash_of[number]
                del numbers[block_hash]
                unused.append(number)
                gone.append(block_hash)
        self._removed.clear()
        if self.changes is not None and gone:
            self.changes.remove(gone)
