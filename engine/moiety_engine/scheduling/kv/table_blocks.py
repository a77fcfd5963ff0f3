"""Blocks in the tables of sequences: growth, prefix hits that are shared or copied in, and freeing behind windows.

A sequence has a block table for each cache group (see `cache.table_layout`); the blocks of all tables come from one
pool. The ledger above decides what is cached, retained and swapped.
"""

from __future__ import annotations

from operator import attrgetter

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.table_layout import TableLayout
from moiety_engine.scheduling.kv.prefix_search import Cell, Hit, PrefixHits, cells_of, held_blocks, key_of
from moiety_engine.sequence import Sequence
from moiety_wire.block_hashes import MARK_BYTES

_first_table = attrgetter("kv.blocks")
VOID = 0  # block number in the entries of a table that no query reads


class TableBlocks:
    """Blocks of one rank group's sequences, over the block pool and the host tier."""

    def __init__(self, pool: BlockPool, layout: TableLayout, host: HostTier | None, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.layout = layout
        self.block_size = layout.block_size
        self.num_tables = layout.num_tables
        self.host = host
        self._from_start = (0,) * layout.num_tables
        self._prefix_caching = prefix_caching
        self._forgotten: frozenset[bytes] = frozenset()  # marks of tenants whose blocks are not cached

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks in each table that `num_tokens` tokens cover."""
        return -(-num_tokens // self.block_size)

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate blocks for `num_tokens` tokens in all. Return False, with nothing taken, if too few are free."""
        kv = sequence.kv
        end = -(-num_tokens // self.block_size)
        missing = end - len(kv.blocks)
        if missing <= 0:
            return True
        if self.num_tables == 1 and not kv.firsts[0]:
            if missing > self.pool.num_free:
                return False
            kv.blocks.extend(self.pool.allocate(missing))
            return True
        counts = [end - max(len(kv.blocks), first) for first in kv.firsts]
        if sum(counts) > self.pool.num_free:
            return False
        new = self.pool.allocate(sum(counts))
        for table, count in zip(kv.tables, counts, strict=True):
            table.extend([VOID] * (missing - count))
            table.extend(new[:count])
            del new[:count]
        return True

    def grow_each(self, sequences: list[Sequence]) -> None:
        """Allocate one more block of each table for each sequence. The caller has checked that enough are free."""
        if self.num_tables == 1:
            new = self.pool.allocate(len(sequences))
            for table, block in zip(map(_first_table, sequences), new, strict=True):
                table.append(block)
            return
        blocks = iter(self.pool.allocate(len(sequences) * self.num_tables))
        for sequence in sequences:
            sequence.kv.blocks.append(next(blocks))
            for table in sequence.kv.further_blocks:
                table.append(next(blocks))

    def num_to_grow(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the free blocks that growth to `num_tokens` tokens takes from the pool at once."""
        missing = -(-num_tokens // self.block_size) - len(sequence.kv.blocks)
        return missing * self.num_tables if missing > 0 else 0

    def num_to_complete(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the free blocks with which a sequence that holds blocks reaches `num_tokens` tokens step by step."""
        kv = sequence.kv
        return max(0, self.layout.missing_for(num_tokens, len(kv.blocks), kv.firsts) - kv.num_held)

    def available_tokens(self, sequence: Sequence) -> int:
        """Return how many tokens in all the sequence could hold if it took every free block."""
        return (len(sequence.kv.blocks) + self.pool.num_free // self.num_tables) * self.block_size

    def holds(self, block_hash: bytes) -> bool:
        """Return whether a block on the device or on the host has these contents."""
        return self._find(block_hash) is not None

    def is_forgotten(self, block_hash: bytes) -> bool:
        """Return whether the block belongs to a tenant whose data was deleted."""
        return block_hash[:MARK_BYTES] in self._forgotten

    def adopt(self, hashes: list[bytes]) -> dict[bytes, int]:
        """Allocate device blocks for contents that the device lacks, and return them by hash.

        At most as many as are free are allocated, for the first hashes first. The caller fills them after the copies of
        `take_copies` have run, before anything else is planned, and releases them with `adopted`.
        """
        wanted = [one for one in dict.fromkeys(hashes) if one[:MARK_BYTES] not in self._forgotten]
        missing = [one for one in wanted if self.pool.find(one) is None]
        blocks = self.pool.allocate(min(len(missing), self.pool.num_free))
        taken = dict(zip(missing, blocks, strict=False))
        for block_hash, block in taken.items():
            self.pool.seal(block, block_hash)
        return taken

    def adopted(self, taken: dict[bytes, int]) -> None:
        """Release the filled blocks of `adopt`; they stay cached, so that prompts can hit them."""
        self.pool.free(reversed(taken.values()))

    def refresh(self, prefix: PrefixHits) -> None:
        """Move a prefix that is needed soon to the end of the eviction order, its tail before its head."""
        for hit in reversed(prefix.hits):
            if not hit.on_host:
                self.pool.share(hit.block)
                self.pool.free([hit.block])
            elif self.host is not None:
                self.host.pool.share(hit.block)
                self.host.free([hit.block])

    def caches(self, sequence: Sequence) -> bool:
        """Return whether the sequence's blocks may be cached."""
        return self._prefix_caching and not (self._forgotten and sequence.block_hashes.mark in self._forgotten)

    # ── internal ──

    def _sealed_key(self, sequence: Sequence, cell: Cell) -> bytes | None:
        table, index = cell
        is_sealed = index < sequence.kv.num_sealed and self.caches(sequence)
        return key_of(sequence.block_hashes.at(index, self.block_size), table) if is_sealed else None

    def _computed_cells(self, sequence: Sequence) -> list[Cell]:
        return cells_of(sequence.kv.firsts, self.blocks_for(sequence.kv.num_computed))

    def _find(self, block_hash: bytes) -> Hit | None:
        if block_hash not in self.pool.contents.numbers:
            return None  # on no tier
        block = self.pool.find(block_hash)
        if block is not None:
            return Hit(block, on_host=False)
        block = None if self.host is None else self.host.pool.find(block_hash)
        return None if block is None else Hit(block, on_host=True)

    def _can_have(self, num_new: int, *, beside: list[int]) -> bool:
        """Return whether `num_new` blocks can be allocated once the blocks `beside` are shared."""
        num_revived = sum(map(self.pool.is_free, beside)) if beside else 0
        return num_new <= self.pool.num_free - num_revived

    def _take_hits(self, sequence: Sequence, hits: list[Hit], firsts: tuple[int, ...], num_blocks: int) -> None:
        """Give the sequence a device block per hit: device hits are shared, host hits get a new block and a copy.

        The hits are those of blocks `firsts` to `num_blocks` - 1 of its tables.
        """
        from_host = [hit.block for hit in hits if hit.on_host]
        for hit in hits:
            if not hit.on_host:
                self.pool.share(hit.block)
        blocks = [hit.block for hit in hits]
        if self.host is not None and from_host:
            for host_block in from_host:
                self.host.pool.share(host_block)  # before the allocation, which might evict it
            new = iter(self.pool.allocate(len(from_host)))
            keys = [self._sealed_key(sequence, cell) for cell in cells_of(firsts, num_blocks)]
            for place, hit in enumerate(hits):
                if hit.on_host:
                    blocks[place] = block = next(new)
                    self.host.fill(hit.block, block)
                    key = keys[place]
                    if key is not None:
                        self.pool.seal(block, key)  # a sequence that hits it runs after the copy
            self.host.free(from_host)
        self._set_tables(sequence, blocks, firsts, num_blocks)

    def _set_tables(self, sequence: Sequence, blocks: list[int], firsts: tuple[int, ...], num_blocks: int) -> None:
        if firsts == (0,):
            sequence.kv.blocks, sequence.kv.further_blocks, sequence.kv.firsts = blocks, (), firsts
            return
        tables, begin = [], 0
        for first in firsts:
            end = begin + num_blocks - first
            tables.append([VOID] * first + blocks[begin:end])
            begin = end
        sequence.kv.blocks, *further = tables
        sequence.kv.further_blocks, sequence.kv.firsts = tuple(further), firsts

    def _free_tables(self, sequence: Sequence) -> None:
        self.pool.free(held_blocks(sequence.kv))
        sequence.kv.blocks, sequence.kv.further_blocks = [], ()

    def _free_behind_windows(self, sequence: Sequence, num_tokens: int) -> None:
        """Free the blocks that no query after `num_tokens` tokens reads."""
        kv, firsts = sequence.kv, self._firsts(num_tokens)
        if firsts == kv.firsts:
            return
        for table, before, first in zip(kv.tables, kv.firsts, firsts, strict=True):
            self.pool.free(reversed(table[before:first]))
        kv.firsts = firsts

    def _firsts(self, num_tokens: int) -> tuple[int, ...]:
        if not self.layout.has_windows:
            return self._from_start
        return tuple(self.layout.first_kept(table, num_tokens) for table in range(self.num_tables))
