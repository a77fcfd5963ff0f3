"""Index of the tier's files by block: the least recently used file is evicted first, as a whole, when bytes are short.

A file's blocks belong to one request, so they are used, and age, together. The index knows only names and hashes.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection
from dataclasses import dataclass

from moiety_engine.cache.retention import PrefixRetention
from moiety_engine.disk.records import Kept


@dataclass(eq=False, slots=True)
class Stored:
    """A file of the tier. `used_s`: unix seconds of its last use."""

    name: str
    num_bytes: int
    hashes: tuple[bytes, ...]
    owner: bytes
    used_s: float
    kept: Kept | None = None  # retention that the file records


class DiskIndex:
    """Index of the tier's files, used by the step loop's thread only."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.num_bytes = 0
        self._files: OrderedDict[str, Stored] = OrderedDict()  # least recently used first
        self._file_of: dict[bytes, Stored] = {}
        self._retention: PrefixRetention[str] = PrefixRetention(max_bytes)
        self._forgotten: set[bytes] = set()  # owners

    @property
    def num_blocks(self) -> int:
        return len(self._file_of)

    @property
    def num_kept(self) -> int:
        """Number of retained files."""
        return sum(name in self._retention for name in self._files)

    def find(self, block_hash: bytes) -> Stored | None:
        return self._file_of.get(block_hash)

    def add(self, stored: Stored) -> list[Stored]:
        """Add a file as the newest; return the files evicted for it.

        If the file's owner is forgotten, returns the file itself.
        """
        if stored.owner in self._forgotten:
            return [stored]
        if stored.name in self._files:
            return []
        self._retention.sweep()
        self._files[stored.name] = stored
        self.num_bytes += stored.num_bytes
        for block_hash in stored.hashes:
            self._file_of.setdefault(block_hash, stored)
        gone = []
        while self.num_bytes > self.max_bytes:
            gone.append(self._next_to_evict())
            self.drop(gone[-1])
        return gone

    def keep(self, stored: Stored, kept: Kept | None, now_s: float) -> None:
        """Retain a file until `kept` ends: others are evicted first."""
        if kept is not None and kept.until_s > now_s and stored.name in self._files:
            self._retention.retain(stored.owner, [(stored.name, stored.num_bytes)], kept.until_s - now_s, kept.weight)

    def use(self, stored: Stored, now_s: float) -> None:
        if stored.name in self._files:
            stored.used_s = max(stored.used_s, now_s)
            self._files.move_to_end(stored.name)

    def drop(self, stored: Stored) -> None:
        """Remove a file from the index; it need not be there."""
        if self._files.pop(stored.name, None) is None:
            return
        self._retention.drop(stored.name)
        self.num_bytes -= stored.num_bytes
        for block_hash in stored.hashes:
            if self._file_of.get(block_hash) is stored:
                del self._file_of[block_hash]

    def take_unused_since(self, unix_s: float) -> list[Stored]:
        """Remove and return the files that have not been used since `unix_s`."""
        # scan all files: retained files, or files found late, are not in the order of their last use
        old = [stored for stored in self._files.values() if stored.used_s < unix_s]
        for stored in old:
            self.drop(stored)
        return old

    def forget(self, owners: Collection[bytes]) -> list[Stored]:
        """Forget the owners' files, now and later; return the existing ones."""
        self._forgotten.update(owners)
        theirs = [stored for stored in self._files.values() if stored.owner in self._forgotten]
        for stored in theirs:
            self.drop(stored)
        return theirs

    def _next_to_evict(self) -> Stored:
        """Return the next file to evict. Retained files are skipped and become as new as others."""
        for _ in range(len(self._files)):
            stored = next(iter(self._files.values()))
            if stored.name not in self._retention:
                break
            self._files.move_to_end(stored.name)
        return next(iter(self._files.values()))
