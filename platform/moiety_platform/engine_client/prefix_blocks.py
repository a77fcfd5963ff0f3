"""Index of the prefix-cache blocks of one replica, from the events that its engine publishes over one session.

It knows names of blocks only, neither tokens nor tenants. Each replica has an index of its own with a bound of its own,
so no tenant can displace the blocks of another replica. Within a replica, the engine's cache decides what is evicted.
"""

from __future__ import annotations

from collections.abc import Sequence

from moiety_wire.prefix_events import PrefixEvents, unpack_names

MAX_BLOCKS_PER_REPLICA = 1_000_000


class PrefixBlocks:
    """Names of the blocks that a replica has cached. Owned by the session with its engine."""

    def __init__(self, max_blocks: int = MAX_BLOCKS_PER_REPLICA) -> None:
        """Create an empty index. Blocks beyond `max_blocks` are not indexed until others are evicted."""
        self._max_blocks = max_blocks
        self._names: dict[int, None] = {}  # a dict of integers, unlike a set, is not visited by garbage collections
        self._next_seq: int | None = None

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, name: int) -> bool:
        return name in self._names

    @property
    def is_known(self) -> bool:
        """True if a snapshot has begun and no message after it is missing."""
        return self._next_seq is not None

    def apply(self, events: PrefixEvents) -> bool:
        """Apply a message. Return False if messages are missing, and a new snapshot is needed.

        A message that was applied before has no effect. Raises ValueError for names that cannot be unpacked.
        """
        stored, evicted = unpack_names(events.stored), unpack_names(events.evicted)
        if events.is_start:
            self._names = {}
        elif self._next_seq is None or events.seq > self._next_seq:
            self._names, self._next_seq = {}, None
            return False
        elif events.seq < self._next_seq:
            return True
        self._next_seq = events.seq + 1
        names = self._names
        for name in evicted:
            names.pop(name, None)
        names.update(dict.fromkeys(stored[: max(0, self._max_blocks - len(names))]))
        return True

    def longest_prefix(self, names: Sequence[int]) -> int:
        """Return how many leading blocks of `names` are cached, by reading each of them."""
        held = self._names
        for index, name in enumerate(names):
            if name not in held:
                return index
        return len(names)

    def estimate_prefix(self, names: Sequence[int]) -> int:
        """Return an upper bound of `longest_prefix` in O(log blocks) lookups.

        It is exact while no block is missing before a cached one; engines evict the end of a prefix first.
        """
        held = self._names
        begin, end = 0, 1  # the blocks before `begin` are assumed to be cached
        while end <= len(names) and names[end - 1] in held:
            begin, end = end, 2 * end
        end = min(end, len(names) + 1)  # block `end` - 1 is missing, or beyond the last
        while begin + 1 < end:
            middle = (begin + end) // 2
            if names[middle - 1] in held:
                begin = middle
            else:
                end = middle
        return begin
