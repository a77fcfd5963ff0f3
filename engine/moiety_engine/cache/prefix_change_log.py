"""Log of the blocks that a replica's prefix cache has stored and evicted since it was last read.

A block that several tiers or rank groups hold counts as stored until the last of them has evicted it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice

from moiety_wire.block_hashes import HASH_BYTES, MARK_BYTES
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, block_name

_KEY_BYTES = MARK_BYTES + HASH_BYTES
REPORT_INTERVAL_NS = 50_000_000


class PrefixChangeLog:
    """Net changes of the set of cached blocks. Shared by all pools of a replica; single-threaded, like them."""

    def __init__(self) -> None:
        self._num_copies: dict[bytes, int] = {}
        self._changed: dict[bytes, bool] = {}  # block hash → whether the last reading had it stored
        self._read_ns = -REPORT_INTERVAL_NS

    def store(self, block_hashes: Iterable[bytes]) -> None:
        """Count a copy of each block. Keys of further cache groups are longer than a hash, and are not counted."""
        copies, changed = self._num_copies, self._changed
        for block_hash in block_hashes:
            if len(block_hash) == _KEY_BYTES:
                num_copies = copies.get(block_hash, 0)
                copies[block_hash] = num_copies + 1
                if not num_copies:
                    changed.setdefault(block_hash, False)

    def remove(self, block_hashes: Iterable[bytes]) -> None:
        """Count a copy of each block no more."""
        copies, changed = self._num_copies, self._changed
        for block_hash in block_hashes:
            if len(block_hash) == _KEY_BYTES:
                num_copies = copies[block_hash] - 1
                if num_copies:
                    copies[block_hash] = num_copies
                else:
                    del copies[block_hash]
                    changed.setdefault(block_hash, True)

    def take(self, now_ns: int) -> tuple[list[int], list[int]] | None:
        """Return the names of the blocks stored and of those evicted since the last call, the first changed first.

        Return None if there is no change, or a call a moment ago returned some. At most MAX_BLOCKS_PER_MESSAGE
        changes are returned at once; further ones follow with the next calls.
        """
        if not self._changed or 0 <= now_ns - self._read_ns < REPORT_INTERVAL_NS:
            return None
        self._read_ns = now_ns
        if len(self._changed) <= MAX_BLOCKS_PER_MESSAGE:
            changed, self._changed = self._changed, {}
        else:
            first = list(islice(self._changed, MAX_BLOCKS_PER_MESSAGE))
            changed = {block_hash: self._changed.pop(block_hash) for block_hash in first}
        stored: list[int] = []
        evicted: list[int] = []
        for block_hash, was_stored in changed.items():
            if was_stored != (block_hash in self._num_copies):
                (evicted if was_stored else stored).append(block_name(block_hash))
        return (stored, evicted) if stored or evicted else None
