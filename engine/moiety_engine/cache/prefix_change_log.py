"""Log of the blocks that a replica's prefix cache has stored and evicted since it was last read.

A block that several tiers or rank groups hold counts as stored until the last of them has evicted it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from moiety_engine.cache.content_table import ContentTable
from moiety_wire.block_hashes import HASH_BYTES, MARK_BYTES
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, block_name

_KEY_BYTES = MARK_BYTES + HASH_BYTES
REPORT_INTERVAL_NS = 50_000_000


class PrefixChangeLog:
    """Net changes of the set of cached blocks. Shared by all pools of a replica; single-threaded, like them."""

    def __init__(self, contents: ContentTable) -> None:
        """Record the changes of a table from now on, while it has no contents."""
        contents.changes = self
        self._contents = contents
        self._changed: dict[bytes, bool] = {}  # block hash → whether the last reading had it stored
        self._read_ns = -REPORT_INTERVAL_NS

    def store(self, block_hash: bytes) -> None:
        """Record contents that the table did not have. Keys of further cache groups, which are longer, are left out."""
        if len(block_hash) == _KEY_BYTES:
            self._changed.setdefault(block_hash, False)

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        """Record contents that the table no longer has."""
        for block_hash in block_hashes:
            if len(block_hash) == _KEY_BYTES:
                self._changed.setdefault(block_hash, True)

    def take(self, now_ns: int) -> tuple[list[int], list[int]] | None:
        """Return the names of the blocks stored and of those evicted since the last call, the first changed first.

        Return None if there is no change, or a call a moment ago returned some. At most MAX_BLOCKS_PER_MESSAGE
        changes are returned at once; further ones follow with the next calls.
        """
        if 0 <= now_ns - self._read_ns < REPORT_INTERVAL_NS:
            return None
        self._contents.count_removed()
        if not self._changed:
            return None
        self._read_ns = now_ns
        if len(self._changed) <= MAX_BLOCKS_PER_MESSAGE:
            changed, self._changed = self._changed, {}
        else:
            first = list(islice(self._changed, MAX_BLOCKS_PER_MESSAGE))
            changed = {block_hash: self._changed.pop(block_hash) for block_hash in first}
        stored: list[int] = []
        evicted: list[int] = []
        numbers = self._contents.numbers
        for block_hash, was_stored in changed.items():
            if was_stored != (block_hash in numbers):
                (evicted if was_stored else stored).append(block_name(block_hash))
        return (stored, evicted) if stored or evicted else None
