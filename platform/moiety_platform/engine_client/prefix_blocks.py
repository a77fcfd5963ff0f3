"""Index of the prefix-cache blocks of one replica, from the events that its engine publishes over one session.

It knows names of blocks only, neither tokens nor tenants. Each replica has an index of its own with a bound of its own,
so no tenant can displace the blocks of another replica. Within a replica, the engine's cache decides what is evicted.

The names are in many dicts: a dict of a million names blocks the event loop while it grows or is freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from moiety_wire.prefix_events import PrefixEvents, unpack_names

MAX_BLOCKS_PER_REPLICA = 1_000_000
NUM_SHARDS = 256  # a power of two
SHARDS_A_TURN = 4  # freed in one turn of the event loop

_MASK = NUM_SHARDS - 1

# Names by their low bits, which are bits of a hash. Garbage collections do not visit a dict of integers, unlike a set.
_Shards = list[dict[int, None]]


class PrefixBlocks:
    """Names of the blocks that a replica has cached. Owned by the session with its engine."""

    def __init__(self, max_blocks: int = MAX_BLOCKS_PER_REPLICA) -> None:
        """Create an empty index. Blocks beyond `max_blocks` are not indexed until others are evicted."""
        self._max_blocks = max_blocks
        self._shards = _empty_shards()
        self._next_seq: int | None = None

    def __len__(self) -> int:
        return sum(map(len, self._shards))

    def __contains__(self, name: int) -> bool:
        return name in self._shards[name & _MASK]

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
            self.clear()
        elif self._next_seq is None or events.seq > self._next_seq:
            self.clear()
            return False
        elif events.seq < self._next_seq:
            return True
        self._next_seq = events.seq + 1
        shards = self._shards
        for name in evicted:
            shards[name & _MASK].pop(name, None)
        for name in stored[: max(0, self._max_blocks - len(self))]:
            shards[name & _MASK][name] = None
        return True

    def clear(self) -> None:
        """Drop all names. A new snapshot is needed.

        In an event loop the memory is freed in its next turns, so that nothing is blocked for long.
        """
        dropped, self._shards, self._next_seq = self._shards, _empty_shards(), None
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # there is no loop to block
            return
        if any(dropped):
            _free(dropped, loop)

    def longest_prefix(self, names: Sequence[int]) -> int:
        """Return how many leading blocks of `names` are cached, by reading each of them."""
        shards = self._shards
        for index, name in enumerate(names):
            if name not in shards[name & _MASK]:
                return index
        return len(names)

    def estimate_prefix(self, names: Sequence[int]) -> int:
        """Return an upper bound of `longest_prefix` in O(log blocks) lookups.

        It is exact while no block is missing before a cached one; engines evict the end of a prefix first.
        """
        shards = self._shards
        begin, end = 0, 1  # the blocks before `begin` are assumed to be cached
        while end <= len(names) and (name := names[end - 1]) in shards[name & _MASK]:
            begin, end = end, 2 * end
        end = min(end, len(names) + 1)  # block `end` - 1 is missing, or beyond the last
        while begin + 1 < end:
            middle = (begin + end) // 2
            if (name := names[middle - 1]) in shards[name & _MASK]:
                begin = middle
            else:
                end = middle
        return begin


def _empty_shards() -> _Shards:
    return [{} for _ in range(NUM_SHARDS)]


def _free(shards: _Shards, loop: asyncio.AbstractEventLoop) -> None:
    """Free some of the shards, and the others in the next turns of the loop."""
    del shards[-SHARDS_A_TURN:]
    if shards:
        loop.call_soon(_free, shards, loop)
