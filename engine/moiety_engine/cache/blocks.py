"""The pool of KV blocks: reference counts, prefix hashes, least-recently-used eviction.

A block is *used* (reference count ≥ 1), *cached* (unreferenced, but its contents may still be hit by their hash) or
*blank*. Cached and blank blocks are both free to allocate; blank ones go first, then the least recently used cached
one. used + cached + blank = num_blocks, always.

It knows ids and hashes only: which tensor rows a block stands for is the runner's business, which tokens hash to what
is `prefix`'s, and where evicted contents go is that of whoever set `on_evict`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from itertools import islice


class NoFreeBlocks(Exception):
    """More blocks were asked for than are free; nothing was allocated."""


class BlockPool:
    """Owner of all block ids 0 … num_blocks-1. Single-threaded, like the step loop that owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        self.on_evict: Callable[[int, bytes], None] | None = None  # called with a cached block before it is forgotten
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(reversed(range(num_blocks)))  # a stack: light traffic touches little memory
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently used first

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._cached)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks with one reference each, contents undefined. Raises NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks wanted, {self.num_free} of {self.num_blocks} free")
        num_blank = min(count, len(self._blank))
        taken = [self._blank.pop() for _ in range(num_blank)]
        if num_blank < count:
            taken += self._evict(count - num_blank)
        for block in taken:
            self._references[block] = 1
        return taken

    def share(self, block: int) -> None:
        """One more reference to a used or cached block."""
        if self._references[block] == 0:
            del self._cached[block]
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each. Hand over a sequence's blocks last first: the tail of a prefix is evicted
        before its head, without which it cannot be hit."""
        for block in blocks:
            self._references[block] -= 1
            remaining = self._references[block]
            assert remaining >= 0, f"block {block} freed more often than referenced"
            if remaining == 0:
                if self._hash_of[block] is None:
                    self._blank.append(block)
                else:
                    self._cached[block] = None

    def find(self, block_hash: bytes) -> int | None:
        """The block whose contents have this hash, if it is still there. Takes no reference."""
        return self._block_of.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def seal(self, block: int, block_hash: bytes) -> None:
        """A used block is full and its contents have this hash. Where two blocks hold the same contents, the first
        stays the one that is found."""
        assert self._references[block] > 0, f"block {block} sealed while free"
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block

    def _evict(self, count: int) -> list[int]:
        """The least recently used cached blocks, which are hit no more."""
        evicted = list(islice(self._cached, count))
        hashes, block_of, on_evict = self._hash_of, self._block_of, self.on_evict
        for block in evicted:
            block_hash = hashes[block]
            assert block_hash is not None, "only what can be hit is kept"
            if on_evict is not None:
                on_evict(block, block_hash)
            del self._cached[block], block_of[block_hash]
            hashes[block] = None
        return evicted
