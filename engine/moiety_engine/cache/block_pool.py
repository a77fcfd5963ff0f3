"""Pool of KV blocks: reference counts, prefix hashes, least-recently-used eviction.

A block is *used* (reference count ≥ 1), *cached* (unreferenced, but its contents may still be hit by their hash) or
*blank*. Cached and blank blocks are both free to allocate: blank ones first, then the least recently used cached one,
then the blocks retained for conversations. used + cached + blank = num_blocks, always.

The pool knows only ids and hashes. The runner maps blocks to tensor rows, `prefix` hashes tokens, and the owner of
`on_evict` handles evicted contents.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from itertools import islice

from moiety_engine.cache.prefix_change_log import PrefixChangeLog
from moiety_wire.block_hashes import MARK_BYTES


class NoFreeBlocks(Exception):
    """More blocks were requested than are free; nothing was allocated."""


class BlockPool:
    """Owner of all block ids 0 … num_blocks-1. Single-threaded, like the step loop that owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        # Called with the cached blocks that an allocation evicts, in order, and with their hashes. Returns the hashes
        # whose contents it has not moved to another pool (see `cache_moved`).
        self.on_evict: Callable[[Sequence[int], Sequence[bytes]], Sequence[bytes]] | None = None
        self.changes: PrefixChangeLog | None = None  # told of stored and removed contents
        self.kept: Container[bytes] = frozenset()  # hashes of the blocks that are evicted last
        self._references = [0] * num_blocks
        self._hash_of: list[bytes | None] = [None] * num_blocks
        self._block_of: dict[bytes, int] = {}
        self._blank = list(reversed(range(num_blocks)))  # a stack: light traffic touches little memory
        # Cached blocks, least recently used first. A block that is used again leaves a void entry behind, and gets a
        # new entry when it is freed; of several entries of a block the last one counts.
        self._cached: deque[int] = deque()
        self._entries = [0] * num_blocks
        self._skipped: dict[int, None] = {}  # retained cached blocks that eviction skipped, the first skipped first
        self.num_cached = 0

    @property
    def num_free(self) -> int:
        return len(self._blank) + self.num_cached

    @property
    def num_blank(self) -> int:
        return len(self._blank)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` blocks with one reference each and undefined contents. Raises NoFreeBlocks."""
        if count > self.num_free:
            raise NoFreeBlocks(f"{count} blocks requested, but {self.num_free} of {self.num_blocks} are free")
        blank, references = self._blank, self._references
        num_blank = min(count, len(blank))
        taken = [blank.pop() for _ in range(num_blank)]
        if num_blank < count:
            taken += self._evict(count - num_blank)
        for block in taken:
            references[block] = 1
        return taken

    def cache_moved(self, block_hashes: Sequence[bytes]) -> list[int | None]:
        """Give free blocks the contents that another pool evicts, one after the other, and return the blocks.

        The same as allocating, sealing and freeing a block for each: a later hash can take the block of an earlier one.
        None stands for a hash that a block has at its turn, and for all of them if no block is free. A moved copy is
        recorded as neither stored nor removed: `changes` has it from the other pool, which must not remove it there.
        """
        count = len(block_hashes)
        if count <= self.num_free and not self._retains and not any(map(self._block_of.__contains__, block_hashes)):
            blocks = self._cache_new(block_hashes)
        elif self.num_free:
            blocks = self._cache_one_by_one(block_hashes)
        else:
            return [None] * count
        if len(self._cached) > 2 * self.num_blocks:
            self._drop_invalid()
        return blocks

    def share(self, block: int) -> None:
        """Add one reference to a used or cached block."""
        if self._references[block] == 0:
            self.num_cached -= 1
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block.

        Pass a sequence's blocks last first: the tail of a prefix is then evicted before its head, without which the
        tail cannot be hit.
        """
        references, hashes, cached, entries = self._references, self._hash_of, self._cached, self._entries
        for block in blocks:
            remaining = references[block] = references[block] - 1
            assert remaining >= 0, f"block {block} freed more often than referenced"
            if remaining == 0:
                if hashes[block] is None:
                    self._blank.append(block)
                else:
                    self.num_cached += 1
                    entries[block] += 1
                    cached.append(block)
        if len(cached) > 2 * self.num_blocks:
            self._drop_invalid()

    def put_back(self, blocks: Iterable[int], *, first: bool = False) -> None:
        """Drop one reference to each block, as if it had not been used.

        A block that was cached before keeps its position in the eviction order. Other blocks are evicted after all
        others, or before all others if `first` is set; among these the last one is evicted first.
        """
        references, hashes, entries = self._references, self._hash_of, self._entries
        for block in blocks:
            if references[block] > 1 or hashes[block] is None or not (entries[block] or first):
                self.free((block,))
                continue
            references[block] -= 1
            self.num_cached += 1
            if not entries[block]:
                entries[block] = 1
                self._cached.appendleft(block)

    def blank(self, block_hash: bytes) -> bool:
        """Invalidate a cached block, which makes it blank. Return False if no block is cached under this hash."""
        block = self._block_of.get(block_hash)
        if block is None or self._references[block]:
            return False
        del self._block_of[block_hash]
        if self.changes is not None:
            self.changes.remove((block_hash,))
        self._hash_of[block] = None  # its entries are void
        self._skipped.pop(block, None)
        self.num_cached -= 1
        self._blank.append(block)
        return True

    def invalidate_marked(self, marks: Container[bytes]) -> list[bytes]:
        """Invalidate all contents whose hashes begin with one of these marks, and return their hashes.

        Used blocks remain with their users and are blank afterwards.
        """
        invalidated = [block_hash for block_hash in self._block_of if block_hash[:MARK_BYTES] in marks]
        self.invalidate(invalidated)
        return invalidated

    def invalidate(self, hashes: Iterable[bytes]) -> None:
        """Invalidate the contents with these hashes, where present.

        Used blocks remain with their users and are blank afterwards.
        """
        for block_hash in hashes:
            if not self.blank(block_hash) and block_hash in self._block_of:
                block = self._block_of.pop(block_hash)
                if self.changes is not None:
                    self.changes.remove((block_hash,))
                self._hash_of[block] = None
                self._skipped.pop(block, None)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block whose contents have this hash, if present. Takes no reference."""
        return self._block_of.get(block_hash)

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def seal(self, block: int, block_hash: bytes) -> None:
        """Register the hash of a used, full block. If two blocks hold the same contents, `find` returns the first."""
        assert self._references[block] > 0, f"block {block} sealed while free"
        if self._hash_of[block] is None and block_hash not in self._block_of:
            self._hash_of[block] = block_hash
            self._block_of[block_hash] = block
            if self.changes is not None:
                self.changes.store((block_hash,))

    def end_retention(self, block_hash: bytes) -> None:
        """End the retention of this hash; if eviction skipped its block, that block is evicted next."""
        block = self._block_of.get(block_hash)
        if block is not None and block in self._skipped:
            del self._skipped[block]
            if not self._references[block] and not self._entries[block]:
                self._entries[block] = 1
                self._cached.appendleft(block)

    def forget(self) -> None:
        """Drop all contents. No block may be used."""
        assert self.num_used == 0, f"{self.num_used} blocks are used"
        if self.changes is not None:
            self.changes.remove(self._block_of)
        self._hash_of = [None] * self.num_blocks
        self._block_of.clear()
        self._blank = list(reversed(range(self.num_blocks)))
        self._cached.clear()
        self._entries = [0] * self.num_blocks
        self._skipped.clear()
        self.num_cached = 0

    @property
    def _retains(self) -> bool:
        """True if the least recently used cached block may not be the first to be evicted."""
        return bool(self._skipped or self.kept)

    def _cache_new(self, block_hashes: Sequence[bytes]) -> list[int | None]:
        """Give free blocks these contents, which are distinct and new. There are enough blocks, and none is retained.

        No hash takes the block of an earlier one, since blocks that get contents are evicted last.
        """
        blank, hashes, block_of, entries = self._blank, self._hash_of, self._block_of, self._entries
        count = len(block_hashes)
        num_blank = min(count, len(blank))
        blocks = [blank.pop() for _ in range(num_blank)]
        self.num_cached += num_blank
        if num_blank < count:
            blocks += (evicted := self._take_oldest(count - num_blank))
            removed = [block_hash for block in evicted if (block_hash := hashes[block]) is not None]
            for block_hash in removed:
                del block_of[block_hash]
            if self.changes is not None:
                self.changes.remove(removed)
        block_of.update(zip(block_hashes, blocks, strict=True))
        for block, block_hash in zip(blocks, block_hashes, strict=True):
            hashes[block] = block_hash
            entries[block] += 1
        self._cached.extend(blocks)
        return [*blocks]

    def _cache_one_by_one(self, block_hashes: Sequence[bytes]) -> list[int | None]:
        """Give free blocks the contents that they lack, as `cache_moved` describes. At least one block is free."""
        blank, hashes, block_of = self._blank, self._hash_of, self._block_of
        cached, entries, evictions = self._cached, self._entries, self._evictions()
        blocks: list[int | None] = []
        removed: list[bytes] = []
        for block_hash in block_hashes:
            if block_hash in block_of:
                blocks.append(None)
                continue
            if blank:
                block = blank.pop()
                self.num_cached += 1
            else:
                block, evicted = next(evictions)
                del block_of[evicted]
                removed.append(evicted)
            hashes[block], block_of[block_hash] = block_hash, block
            entries[block] += 1
            cached.append(block)
            blocks.append(block)
        if self.changes is not None and removed:
            self.changes.remove(removed)
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Evict the least recently used cached blocks, retained ones last, and return them."""
        hashes, block_of = self._hash_of, self._block_of
        evictions = islice(self._evictions(), count) if self._retains else None
        blocks = self._take_oldest(count) if evictions is None else [block for block, _ in evictions]
        block_hashes = [block_hash for block in blocks if (block_hash := hashes[block]) is not None]
        removed = block_hashes if self.on_evict is None else self.on_evict(blocks, block_hashes)
        for block_hash in block_hashes:
            del block_of[block_hash]
        for block in blocks:
            hashes[block] = None
        if self.changes is not None and removed:
            self.changes.remove(removed)
        self.num_cached -= count
        return blocks

    def _take_oldest(self, count: int) -> list[int]:
        """Remove the `count` least recently used cached blocks from the order of eviction, and return them.

        Only without retained blocks. The caller evicts them, or gives them other contents.
        """
        cached, entries, references, hashes = self._cached, self._entries, self._references, self._hash_of
        oldest: list[int] = []
        while num_missing := count - len(oldest):
            for block in [cached.popleft() for _ in range(num_missing)]:
                entries[block] = num_entries = entries[block] - 1
                if not num_entries and not references[block] and hashes[block] is not None:
                    oldest.append(block)
        return oldest

    def _evictions(self) -> Iterator[tuple[int, bytes]]:
        """Yield the cached blocks in the order of eviction, with their hashes.

        The caller evicts each one, or gives it other contents, before the pool is used otherwise. It takes no more than
        there are.
        """
        cached, entries, references, skipped = self._cached, self._entries, self._references, self._skipped
        hashes = self._hash_of
        kept = self.kept or ()  # most pools retain nothing
        while True:
            is_kept = not cached
            if is_kept:
                block = next(iter(skipped))
            else:
                block = cached.popleft()
                entries[block] -= 1
            if skipped:
                skipped.pop(block, None)
            block_hash = hashes[block]
            if entries[block] or references[block] or block_hash is None:
                continue
            if kept and not is_kept and block_hash in kept:
                skipped[block] = None
                continue
            yield block, block_hash

    def _drop_invalid(self) -> None:
        """Keep only the last entry of each cached block, in order."""
        held, hashes = self._references, self._hash_of
        newest = dict.fromkeys(reversed(self._cached))
        last = [block for block in newest if not held[block] and hashes[block] is not None]
        self._cached = deque(reversed(last))
        self._entries = [0] * self.num_blocks
        for block in last:
            self._entries[block] = 1
