"""Which file of the tier has which block: the least recently used file goes first, whole, where bytes are short.

A file's blocks are of one request, so they are used, and grow old, together. It knows names and hashes only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from moiety_engine.cache.retention import PrefixRetention
from moiety_engine.disk.records import Kept


@dataclass(eq=False, slots=True)
class Stored:
    """A file. `used_s`: unix seconds of its last use."""

    name: str
    num_bytes: int
    hashes: tuple[bytes, ...]
    owner: bytes
    used_s: float
    kept: Kept | None = None  # as the file says


class DiskIndex:
    """Used by the step loop's thread only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[str, Stored] = OrderedDict()  # the least recently used first
        self._file_of: dict[bytes, Stored] = {}
        self._pins: PrefixRetention[str] = PrefixRetention(max_bytes)
        self._forgotten: set[bytes] = set()  # owners

    @property
    def num_blocks(self) -> int:
        return len(self._file_of)

    @property
    def num_kept(self) -> int:
        """Files."""
        return sum(name in self._pins for name in self._files)

    def find(self, block_hash: bytes) -> Stored | None:
        return self._file_of.get(block_hash)

    def add(self, stored: Stored) -> list[Stored]:
        """A file was written or found, and is the newest. Returns those that must go for it, which are forgotten, or
        the file itself if its owner is."""
        if stored.owner in self._forgotten:
            return [stored]
        if stored.name in self._files:
            return []
        self._pins.sweep()
        self._files[stored.name] = stored
        self.num_bytes += stored.num_bytes
        for block_hash in stored.hashes:
            self._file_of.setdefault(block_hash, stored)
        gone = []
        while self.num_bytes > self.max_bytes:
            gone.append(self._first_to_go())
            self.drop(gone[-1])
        return gone

    def keep(self, stored: Stored, kept: Kept | None, now_s: float) -> None:
        """It goes after others for a while."""
        if kept is not None and kept.until_s > now_s and stored.name in self._files:
            self._pins.pin(stored.owner, [(stored.name, stored.num_bytes)], kept.until_s - now_s, kept.weight)

    def use(self, stored: Stored, now_s: float) -> None:
        if stored.name in self._files:
            stored.used_s = max(stored.used_s, now_s)
            self._files.move_to_end(stored.name)

    def drop(self, stored: Stored) -> None:
        """It is not there any more; it need not have been."""
        if self._files.pop(stored.name, None) is None:
            return
        self._pins.drop(stored.name)
        self.num_bytes -= stored.num_bytes
        for block_hash in stored.hashes:
            if self._file_of.get(block_hash) is stored:
                del self._file_of[block_hash]

    def take_unused_since(self, unix_s: float) -> list[Stored]:
        """Forget what has not been used since then."""
        # all are looked at: what is kept, or was found late, is not in the order of its last use
        old = [stored for stored in self._files.values() if stored.used_s < unix_s]
        for stored in old:
            self.drop(stored)
        return old

    def forget(self, owners: Collection[bytes]) -> list[Stored]:
        """Nothing of these is kept, now or later; the files that there were."""
        self._forgotten.update(owners)
        theirs = [stored for stored in self._files.values() if stored.owner in self._forgotten]
        for stored in theirs:
            self.drop(stored)
        return theirs

    def _first_to_go(self) -> Stored:
        """What is kept is passed over, and is as new as others then."""
        for _ in range(len(self._files)):
            stored = next(iter(self._files.values()))
            if stored.name not in self._pins:
                break
            self._files.move_to_end(stored.name)
        return next(iter(self._files.values()))
