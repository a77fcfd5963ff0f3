"""Pool of KV blocks: reference counts, prefix hashes, least-recently-used eviction.

A block is *used* (reference count ≥ 1), *cached* (unreferenced, but its contents may still be hit by their hash) or
*blank*. Cached and blank blocks are both free to allocate: blank ones first, then the least recently used cached one,
then the blocks retained for conversations. used + cached + blank = num_blocks, always.

The pool knows only ids and contents, which a table numbers. The runner maps blocks to tensor rows, `prefix` hashes
tokens, and the owner of `on_evict` handles evicted contents.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence, Sized
from itertools import islice
from operator import itemgetter

from moiety_engine.cache.content_table import NOWHERE, ContentTable
from moiety_wire.block_hashes import MARK_BYTES


class NoFreeBlocks(Exception):
    """More blocks were requested than are free; nothing was allocated."""


class BlockPool:
    """Owner of all block ids 0 … num_blocks-1. Single-threaded, like the step loop that owns it."""

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 1:
            raise ValueError(f"a pool needs at least one block, not {num_blocks}")
        self.num_blocks = num_blocks
        # Called with the cached blocks that an allocation evicts, in order, and with the numbers of their contents.
        # Returns the numbers of those that it has not moved to another pool (see `cache_moved`).
        self.on_evict: Callable[[Sequence[int], Sequence[int]], Sequence[int]] | None = None
        self._kept: Container[bytes] = ()  # hashes of the blocks that are evicted last
        self._may_be_kept: Sized = ()  # empty if `_kept` is
        self._references = [0] * num_blocks
        self._content_of = [NOWHERE] * num_blocks  # number of each block's contents
        self.share_contents(ContentTable())
        self._blank = list(reversed(range(num_blocks)))  # a stack: light traffic touches little memory
        # Cached blocks, least recently used first, from index `_begin` on. A block that is used again leaves a void
        # entry behind, and gets a new one when it is freed; of several entries of a block the last one counts.
        self._cached: list[int] = []
        self._begin = 0
        self._most_entries = 3 * num_blocks  # before `_shorten_order`
        self._num_void: dict[int, int] = {}  # by block, if it has void entries
        self._skipped: dict[int, None] = {}  # retained cached blocks that eviction skipped, the first skipped first
        self.num_free = num_blocks  # cached and blank blocks

    def share_contents(self, contents: ContentTable) -> None:
        """Use the table of another pool, so that the same contents have the same number in both.

        Call it while this pool holds no contents.
        """
        assert max(self._content_of) < 0, "the contents of a pool are numbered by another table"
        self.contents = contents
        self._block_of = contents.add_tier()

    def evict_last(self, kept: Container[bytes], may_be_kept: Sized) -> None:
        """Evict cached blocks with these hashes after all others.

        Both may change later. `may_be_kept` is empty while `kept` is; it is asked first, since most pools keep nothing.
        """
        self._kept, self._may_be_kept = kept, may_be_kept

    @property
    def num_cached(self) -> int:
        return self.num_free - len(self._blank)

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
        if not count:
            return []
        blank, references = self._blank, self._references
        if blank:
            taken = blank[: -count - 1 : -1]
            del blank[-count:]
            if len(taken) < count:
                taken += self._evict(count - len(taken))
        else:
            taken = self._evict(count)
        self.num_free -= count
        for block in taken:
            references[block] = 1
        return taken

    def cache_moved(self, numbers: Sequence[int]) -> list[int]:
        """Give free blocks the contents that another pool evicts, one after the other, and return the blocks.

        The same as allocating, sealing and freeing a block for each: later contents can take the block of earlier ones.
        NOWHERE stands for contents that a block has at their turn, and for all of them if no block is free. The copy of
        the other pool counts as this one's, so that the other pool must not remove it from the table.
        """
        count, content_of, block_of = len(numbers), self._content_of, self._block_of
        last = max(itemgetter(*numbers)(block_of)) if count > 1 else block_of[numbers[0]]  # NOWHERE if all are new
        if last >= 0 or self._skipped or self._may_be_kept or count > self.num_free:
            return self._cache_one_by_one(numbers) if self.num_free else [NOWHERE] * count
        # None takes the block of an earlier one, since blocks that get contents are evicted last.
        blocks = self._blank[: -count - 1 : -1]
        del self._blank[-count:]
        if len(blocks) < count:
            oldest, removed = self._take_oldest(count - len(blocks))
            for number in removed:
                block_of[number] = NOWHERE
            self.contents.remove_copies(removed)
            blocks += oldest
        for block, number in zip(blocks, numbers, strict=True):
            content_of[block], block_of[number] = number, block
        self._cached += blocks
        if len(self._cached) > self._most_entries:
            self._shorten_order()
        return blocks

    def share(self, block: int) -> None:
        """Add one reference to a used or cached block."""
        if self._references[block] == 0:
            self.num_free -= 1
            if block not in self._skipped:
                self._void_entry(block)
        self._references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block.

        Pass a sequence's blocks last first: the tail of a prefix is then evicted before its head, without which the
        tail cannot be hit.
        """
        references, content_of, cached, skipped = self._references, self._content_of, self._cached, self._skipped
        num_freed = 0
        for block in blocks:
            remaining = references[block] = references[block] - 1
            assert remaining >= 0, f"block {block} freed more often than referenced"
            if remaining == 0:
                num_freed += 1
                if content_of[block] < 0:
                    self._blank.append(block)
                else:
                    cached.append(block)
                    if skipped:
                        skipped.pop(block, None)
        self.num_free += num_freed
        if len(cached) > self._most_entries:
            self._shorten_order()

    def put_back(self, blocks: Iterable[int], *, first: bool = False) -> None:
        """Drop one reference to each block, as if it had not been used.

        A block that was cached before keeps its position in the eviction order. Other blocks are evicted after all
        others, or before all others if `first` is set; among these the last one is evicted first.
        """
        references, content_of, num_void = self._references, self._content_of, self._num_void
        for block in blocks:
            if references[block] > 1 or content_of[block] < 0 or not (block in num_void or first):
                self.free((block,))
                continue
            references[block] -= 1
            self.num_free += 1
            if block in num_void:
                self._pass_void_entry(block)  # it counts again
            else:
                self._skipped.pop(block, None)
                self._evict_first(block)

    def blank(self, block_hash: bytes) -> bool:
        """Invalidate a cached block, which makes it blank. Return False if no block is cached under this hash."""
        block = self.find(block_hash)
        if block is None or self._references[block]:
            return False
        if block not in self._skipped:
            self._void_entry(block)
        self._remove_contents(block)
        self._blank.append(block)
        return True

    def invalidate_marked(self, marks: Container[bytes]) -> list[bytes]:
        """Invalidate all contents whose hashes begin with one of these marks, and return their hashes.

        Used blocks remain with their users and are blank afterwards.
        """
        hashes = self.contents.hashes_of([number for number in self._content_of if number >= 0])
        invalidated = [block_hash for block_hash in hashes if block_hash[:MARK_BYTES] in marks]
        self.invalidate(invalidated)
        return invalidated

    def invalidate(self, hashes: Iterable[bytes]) -> None:
        """Invalidate the contents with these hashes, where present.

        Used blocks remain with their users and are blank afterwards.
        """
        for block_hash in hashes:
            if not self.blank(block_hash) and (block := self.find(block_hash)) is not None:
                self._remove_contents(block)

    def find(self, block_hash: bytes) -> int | None:
        """Return the block whose contents have this hash, if present. Takes no reference."""
        number = self.contents.numbers.get(block_hash)
        if number is None:
            return None
        block = self._block_of[number]
        return None if block < 0 else block

    def is_free(self, block: int) -> bool:
        return self._references[block] == 0

    def is_shared(self, block: int) -> bool:
        return self._references[block] > 1

    def seal(self, block: int, block_hash: bytes) -> None:
        """Register the hash of a used, full block. If two blocks hold the same contents, `find` returns the first."""
        assert self._references[block] > 0, f"block {block} sealed while free"
        if self._content_of[block] < 0:
            contents = self.contents
            number = contents.numbers.get(block_hash)
            if number is None:
                number = contents.add(block_hash)
            elif self._block_of[number] < 0:
                contents.add_copy(number)
            else:
                return
            self._content_of[block], self._block_of[number] = number, block

    def end_retention(self, block_hash: bytes) -> None:
        """End the retention of this hash; if eviction skipped its block, that block is evicted next."""
        block = self.find(block_hash) if self._skipped else None
        if block is not None and block in self._skipped:
            del self._skipped[block]
            if not self._references[block]:
                self._evict_first(block)

    def forget(self) -> None:
        """Drop all contents. No block may be used."""
        assert self.num_used == 0, f"{self.num_used} blocks are used"
        for block, number in enumerate(self._content_of):
            if number >= 0:
                self._remove_contents(block)
        self._blank = list(reversed(range(self.num_blocks)))
        self._cached.clear()
        self._begin = 0
        self._num_void.clear()
        self._skipped.clear()
        self.num_free = self.num_blocks

    def _remove_contents(self, block: int) -> None:
        """Remove the contents of a block that has some."""
        number = self._content_of[block]
        self._content_of[block] = self._block_of[number] = NOWHERE
        self._skipped.pop(block, None)
        self.contents.remove_copies((number,))
        self.contents.count_removed()

    def _cache_one_by_one(self, numbers: Sequence[int]) -> list[int]:
        """Give free blocks the contents that they lack, as `cache_moved` describes. At least one block is free."""
        blank, content_of, block_of = self._blank, self._content_of, self._block_of
        cached, evictions = self._cached, self._evictions()
        blocks: list[int] = []
        removed: list[int] = []
        for number in numbers:
            if block_of[number] >= 0:
                blocks.append(NOWHERE)
                continue
            if blank:
                block = blank.pop()
            else:
                block = next(evictions)
                evicted = content_of[block]
                block_of[evicted] = NOWHERE
                removed.append(evicted)
            content_of[block], block_of[number] = number, block
            cached.append(block)
            blocks.append(block)
        self.contents.remove_copies(removed)
        if len(cached) > self._most_entries:
            self._shorten_order()
        return blocks

    def _evict(self, count: int) -> list[int]:
        """Evict the least recently used cached blocks, retained ones last, and return them."""
        content_of, block_of = self._content_of, self._block_of
        numbers: Sequence[int]
        if self._skipped or self._may_be_kept:
            blocks = list(islice(self._evictions(), count))
            numbers = [content_of[block] for block in blocks]
        else:
            blocks, numbers = self._take_oldest(count)  # the usual case
        removed = numbers if self.on_evict is None else self.on_evict(blocks, numbers)
        for block, number in zip(blocks, numbers, strict=True):
            content_of[block] = block_of[number] = NOWHERE
        if removed:
            self.contents.remove_copies(removed)
        return blocks

    def _take_oldest(self, count: int) -> tuple[list[int], Sequence[int]]:
        """Remove the `count` least recently used cached blocks from the order of eviction.

        Return the blocks and the numbers of their contents. Only without retained blocks. The caller evicts them, or
        gives them other contents.
        """
        cached, num_void = self._cached, self._num_void
        begin, self._begin = self._begin, self._begin + count
        oldest = cached[begin : self._begin]
        if num_void and not num_void.keys().isdisjoint(oldest):
            oldest = [block for block in oldest if block not in num_void or not self._pass_void_entry(block)]
            while num_missing := count - len(oldest):
                further = cached[self._begin : self._begin + num_missing]
                self._begin += num_missing
                oldest += [block for block in further if not self._pass_void_entry(block)]
        content_of = self._content_of
        return oldest, itemgetter(*oldest)(content_of) if count > 1 else (content_of[oldest[0]],)

    def _evictions(self) -> Iterator[int]:
        """Yield the cached blocks in the order of eviction.

        The caller evicts each one, or gives it other contents, before the pool is used otherwise. It takes no more than
        there are.
        """
        cached, references, skipped = self._cached, self._references, self._skipped
        content_of, hash_of = self._content_of, self.contents.hash_of
        kept = self._kept if self._may_be_kept else ()
        while True:
            is_kept = self._begin == len(cached)
            if is_kept:
                block = next(iter(skipped))
                del skipped[block]
            else:
                block = cached[self._begin]
                self._begin += 1
                if self._pass_void_entry(block):
                    continue
            number = content_of[block]
            if references[block]:
                continue
            if kept and not is_kept and hash_of[number] in kept:
                skipped[block] = None
                continue
            yield block

    def _void_entry(self, block: int) -> None:
        """Mark the block's entry in the order of eviction as void."""
        self._num_void[block] = self._num_void.get(block, 0) + 1

    def _pass_void_entry(self, block: int) -> bool:
        """Count a void entry of the block no more. Return False if it has none, so that its entry counts."""
        num_left = self._num_void.get(block, 0) - 1
        if num_left > 0:
            self._num_void[block] = num_left
        elif num_left == 0:
            del self._num_void[block]
        return num_left >= 0

    def _evict_first(self, block: int) -> None:
        """Enter a cached block into the order of eviction before all others."""
        if self._begin:
            self._begin -= 1
            self._cached[self._begin] = block
        else:
            self._cached.insert(0, block)

    def _shorten_order(self) -> None:
        """Delete the entries before `_begin`, or all void ones, of more than `_most_entries`."""
        if self._begin > self.num_blocks:
            del self._cached[: self._begin]
            self._begin = 0
        if len(self._cached) - self._begin > 2 * self.num_blocks:
            held, content_of = self._references, self._content_of
            newest = dict.fromkeys(reversed(self._cached[self._begin :]))
            last = [block for block in newest if not held[block] and content_of[block] >= 0]
            self._cached, self._begin = last[::-1], 0
            self._num_void.clear()
