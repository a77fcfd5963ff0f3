"""KV blocks of sequences: prefix hits, growth, sealing and swapping, on top of the block pool and the host tier.

A sequence has a block table for each cache group (see `cache.table_layout`); the blocks of all tables come from one
pool. It holds either device blocks or, when swapped out, host blocks (`host_blocks`), never both; these hold its
`num_computed` tokens, in tables with a window those that its next token sees. Copies between device and host are queued
when blocks change owner. The caller that plans a step takes them with `take_copies` once per plan and runs them before
the step's forward pass, also when the step is empty. KV from other engines is loaded after the copies: `take_kv_loads`.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListOf

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import Copies, HostTier
from moiety_engine.cache.retention import PrefixRetention
from moiety_engine.cache.state_slots import StateSlots
from moiety_engine.cache.table_layout import CHUNK_TOKENS, TableLayout
from moiety_engine.scheduling.kv.prefix_search import (
    NO_HITS,
    Hit,
    PrefixHits,
    held_blocks,
    key_of,
    longest_prefix,
)
from moiety_engine.scheduling.kv.state_ledger import StateLedger
from moiety_engine.scheduling.plan import KvLoad
from moiety_engine.sequence import Sequence
from moiety_engine.sequence_records import NO_BLOCKS


class KvLedger(StateLedger):
    """Ledger of one rank group's KV blocks. The only place that moves blocks between pool, host tier and sequences."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_caching: bool,
        host: HostTier | None = None,
        answers_apart: bool = False,
        windows: tuple[int | None, ...] = (None,),
        chunked: frozenset[int] = frozenset(),
        max_chunk_tokens: int = CHUNK_TOKENS,
        states: StateSlots | None = None,
    ) -> None:
        """Create the ledger.

        `windows`, `chunked`, `max_chunk_tokens`: see `TableLayout`. `states`: slots of recurrent states, or None.
        `answers_apart` means that an output's KV is never a prefix hit of another prompt, because its bits differ.
        """
        layout = TableLayout(block_size, windows, chunked, max_chunk_tokens=max_chunk_tokens)
        super().__init__(pool, layout, host, states, prefix_caching=prefix_caching)
        self.answers_apart = answers_apart
        self.swapped_out_total = 0  # blocks of sequences, including those that needed no copy
        self.swapped_in_total = 0
        self.host_hit_blocks_total = 0  # blocks of prefix hits that were on the host
        self.on_release: Callable[[Sequence], None] | None = None  # called with a sequence before it gives up blocks
        self.kv_loads: dict[int, KvLoad] = {}  # queued, by the sequences' keys
        self.retention: PrefixRetention[bytes] = PrefixRetention(pool.num_blocks, end_retention=self._end_retention)
        pool.evict_last(self.retention, self.retention.owner_of)
        if states is not None:
            states.pool.evict_last(self.retention, self.retention.owner_of)
        if host is not None:
            host.attach(pool)
            host.pool.evict_last(self.retention, self.retention.owner_of)
        else:
            pool.on_evict = self._evicted

    # ── prefixes ──

    def find_prefix(self, sequence: Sequence) -> PrefixHits:
        """Return the longest cached prefix of the sequence that all tables have.

        The last token is always left to compute, and so are the tokens from which log-probabilities of the prompt
        come. The hits may be evicted as soon as blocks are allocated to others.
        """
        if not self.caches(sequence):
            return NO_HITS
        most = (sequence.num_reusable - 1) // self.block_size
        if not self.layout.is_plain or self.states is not None:
            has_state = None if self.states is None else self.states.has_snapshot
            return longest_prefix(sequence, self.layout, most, self._find, has_state)
        hits: list[Hit] = []
        hashes, size, numbers = sequence.block_hashes, self.block_size, self.pool.contents.numbers
        for index in range(most):
            block_hash = hashes.at(index, size)
            hit = self._find(block_hash) if block_hash in numbers else None
            if hit is None:
                break
            hits.append(hit)
        return PrefixHits(len(hits), hits, len(hits)) if hits else NO_HITS

    @property
    def caches_prefixes(self) -> bool:
        return self._prefix_caching

    def num_on_device(self, hashes: list[bytes]) -> int:
        """Return how many of these blocks, counted from the first, the device holds without a gap."""
        for index, block_hash in enumerate(hashes):
            if self.pool.find(block_hash) is None:
                return index
        return len(hashes)

    def is_on_host(self, block_hash: bytes) -> bool:
        return self.host is not None and self.host.pool.find(block_hash) is not None

    def next_hash(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """Return the hash of the first block that the sequence must compute, if it will be full and shareable."""
        if not self.caches(sequence) or (num_hits + 1) * self.block_size >= sequence.num_reusable:
            return None
        return sequence.block_hashes.at(num_hits, self.block_size)

    def start(self, sequence: Sequence, prefix: PrefixHits, num_tokens: int) -> bool:
        """Share the cached prefix if blocks for `num_tokens` tokens in all, and a state slot, are available.

        Return False, with nothing taken, otherwise.
        """
        num_hits = prefix.num_blocks
        firsts = self._firsts(num_hits * self.block_size) if num_hits else self._from_start
        num_blocks = self.layout.missing_for(num_tokens, num_hits, firsts)
        if not num_hits and self.states is None:
            if num_blocks > self.pool.num_free:
                return False
            sequence.kv.num_sealed = sequence.kv.num_computed = 0
            self._set_tables(sequence, [], firsts, 0)
            return True
        on_device = [hit.block for hit in prefix.hits if not hit.on_host]
        if not self.has_state_slot or not self._can_have(num_blocks - len(on_device), beside=on_device):
            return False
        if self.states is not None:
            self._start_state(sequence, prefix, self.states)
        sequence.kv.num_sealed = num_hits
        self._take_hits(sequence, prefix.hits, firsts, num_hits)
        sequence.kv.num_computed = num_hits * self.block_size
        self.host_hit_blocks_total += len(prefix.hits) - len(on_device)
        return True

    def num_blocks_to_start(self, prefix: PrefixHits, num_tokens: int) -> int:
        """Return the free blocks that `start` and growth to `num_tokens` take from the pool.

        A hit on the host needs a new block; an unreferenced hit on the device is no longer free.
        """
        num_hits = prefix.num_blocks
        if not num_hits:
            return self.layout.missing_for(num_tokens, 0, self._from_start)
        missing = self.layout.missing_for(num_tokens, num_hits, self._firsts(num_hits * self.block_size))
        return missing - self._num_in_use(prefix.hits)

    def queue_kv_load(self, sequence: Sequence) -> None:
        """Queue the load of the KV from another engine into the sequence's blocks, after its prefix hits.

        Call after `start`.
        """
        first, end = sequence.kv.num_computed, sequence.kv.num_transferred_tokens
        sequence.kv.num_transferred_tokens = 0
        if end <= first:
            return
        self._free_behind_windows(sequence, end)
        grown = self.grow(sequence, end)
        assert grown, "a sequence was started without blocks for all its tokens"
        tables = [table[: self.blocks_for(end)] for table in sequence.kv.tables]
        self.kv_loads[sequence.key] = KvLoad(sequence.key, first, tables, sequence.kv.firsts, sequence.kv.state_slot)
        # The states at earlier ends, and at this one before the next plan, are not there to be kept.
        sequence.kv.snapshot_ends = tuple(one for one in sequence.kv.snapshot_ends if one * self.block_size > end)
        sequence.kv.num_computed = sequence.kv.peak_computed = end
        sequence.kv.num_landed = end - first

    def take_kv_loads(self) -> list[KvLoad]:
        """Return the queued KV loads, once per plan, to run after the copies."""
        kv_loads, self.kv_loads = list(self.kv_loads.values()), {}
        return kv_loads

    # ── full blocks ──

    def completed_hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """Return the hashes of the blocks that become full when the first `num_tokens` tokens are computed."""
        if not self.caches(sequence):
            return []
        full = num_tokens // self.block_size
        return sequence.block_hashes.between(sequence.kv.num_sealed, full, self.block_size)

    def completed_hash(self, sequence: Sequence, index: int, num_tokens: int) -> bytes | None:
        """Return the one of `completed_hashes` that is the hash of block `index`; None if it is not among them."""
        if not sequence.kv.num_sealed <= index < num_tokens // self.block_size or not self.caches(sequence):
            return None
        return sequence.block_hashes.at(index, self.block_size)

    def seal(self, sequence: Sequence) -> None:
        """Publish the sequence's full blocks in the prefix cache, and free those that its windows have passed."""
        kv = sequence.kv
        if self.layout.is_plain and self.states is None:
            for block_hash in self.completed_hashes(sequence, kv.num_computed):
                self.pool.seal(kv.blocks[kv.num_sealed], block_hash)
                kv.num_sealed += 1
            return
        further = [(number, table) for number, table in enumerate(kv.further_blocks, 1)]
        for block_hash in self.completed_hashes(sequence, kv.num_computed):
            index = kv.num_sealed
            if index >= kv.firsts[0]:
                self.pool.seal(kv.blocks[index], block_hash)
            for number, table in further:
                if index >= kv.firsts[number]:
                    self.pool.seal(table[index], key_of(block_hash, number))
            kv.num_sealed += 1
        if self.layout.has_windows:
            self._free_behind_windows(sequence, kv.num_computed)
        if self.states is not None and kv.snapshot_ends and kv.num_computed == kv.snapshot_ends[0] * self.block_size:
            if self.caches(sequence):  # its tenant's data may have been deleted since it began
                *_, block_hash = sequence.block_hashes.between(0, kv.snapshot_ends[0], self.block_size)
                self.states.keep_snapshot(kv.state_slot, block_hash)
            kv.snapshot_ends = kv.snapshot_ends[1:]

    def num_unshared(self, sequence: Sequence) -> int:
        """Return how many device blocks would become free if the sequence released its own."""
        return sum(not self.pool.is_shared(block) for block in held_blocks(sequence.kv))

    def release(self, sequence: Sequence) -> None:
        """Release all device and host blocks; the computed contents may still be hit by their hashes."""
        if self.kv_loads.pop(sequence.key, None) is not None:  # its KV is not loaded yet
            sequence.kv.num_transferred_tokens = sequence.kv.num_computed
        elif sequence.kv.num_sealed:
            self._retain_released(sequence)
        self._free_tables(sequence)
        self._end_state(sequence)
        sequence.kv.firsts = self._from_start
        if self.host is not None:
            self.host.free(sequence.kv.host_blocks)
        sequence.kv.host_blocks = NO_BLOCKS
        sequence.kv.num_sealed = 0
        sequence.kv.num_computed = 0

    def put_back(self, sequence: Sequence, num_shared: int, num_own: int) -> None:
        """Release the blocks of a speculative prefill without changing the eviction order of other blocks.

        Only for models with a single table and no window. The first `num_shared` blocks were hits. Of the later ones,
        the first `num_own` enter the normal eviction order, and the others are evicted before all other blocks.
        """
        shared, new = sequence.kv.blocks[:num_shared], sequence.kv.blocks[num_shared:]
        self.pool.put_back(reversed(shared))
        self.pool.put_back(reversed(new[:num_own]))
        self.pool.put_back(new[num_own:], first=True)
        sequence.kv.blocks = []
        sequence.kv.num_sealed = sequence.kv.num_computed = 0

    def forget_tenants(self, marks: frozenset[bytes]) -> int:
        """Delete the cached blocks of these tenants, cache none from now on, and return how many there were."""
        self._forgotten |= marks
        invalidated = self.pool.invalidate_marked(marks)
        invalidated += [] if self.host is None else self.host.pool.invalidate_marked(marks)
        if self.states is not None:
            self.states.pool.invalidate_marked(marks)
        for block_hash in invalidated:
            self.retention.drop(block_hash)
        return len(invalidated)

    def invalidate(self, sequence: Sequence) -> list[bytes]:
        """Invalidate the contents of the sequence's full blocks on the device and on the host, and return their hashes.

        No other sequence can hit them. The blocks stay with the sequence.
        """
        if not self.caches(sequence):
            return []
        num_full = min(sequence.kv.peak_computed, sequence.num_known) // self.block_size
        of_tokens = sequence.block_hashes.between(0, num_full, self.block_size)
        hashes = [key_of(token_hash, table) for table in range(self.num_tables) for token_hash in of_tokens]
        self.pool.invalidate(hashes)
        if self.host is not None:
            self.host.pool.invalidate(hashes)
        if self.states is not None:
            self.states.pool.invalidate(hashes)
        for block_hash in hashes:
            self.retention.drop(block_hash)
        sequence.kv.num_sealed = 0  # so that its blocks are not offered to the disk
        return hashes

    def forget(self) -> None:
        """Drop the cache's contents on the device and on the host. No sequence may hold blocks."""
        self.retention.forget()
        self.pool.forget()
        if self.host is not None:
            self.host.forget()
        if self.states is not None:
            self.states.forget()

    # ── the host tier ──

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Return whether the sequence has computed KV on the device and the host tier has enough blocks for it.

        Recurrent states need a host slot too.
        """
        return self._host_places(sequence) is not None

    def num_to_copy_out(self, sequence: Sequence) -> int:
        """Return how many blocks `swap_out` would copy: those whose contents the host tier lacks.

        Swapping in copies at most `num_computed_blocks`, less those that the device still has by hash.
        """
        return 0 if self.host is None else self._known_on_host(self.host, sequence).count(None)

    def num_computed_blocks(self, sequence: Sequence) -> int:
        """Return the number of blocks that hold the sequence's computed tokens, as far as it needs them."""
        return len(self._computed_cells(sequence))

    def swap_out(self, sequence: Sequence) -> bool:
        """Swap the computed KV out to the host and free the device blocks.

        `num_computed` does not change. Prefix blocks that other sequences share are referenced on the host and stay on
        the device for the others. Return False, with nothing changed, if `can_swap_out` is False.
        """
        host, known = self.host, self._host_places(sequence)
        if host is None or known is None:
            return False
        for host_block in known:
            if host_block is not None:
                host.pool.share(host_block)  # before any allocation, which might evict it
        tables = sequence.kv.tables
        sequence.kv.host_blocks = [
            host.take(tables[cell[0]][cell[1]], self._sealed_key(sequence, cell)) if host_block is None else host_block
            for cell, host_block in zip(self._computed_cells(sequence), known, strict=True)
        ]
        self._free_tables(sequence)
        if self.states is not None:
            sequence.kv.state_slot = self.states.swap_out(sequence.kv.state_slot)
        self.swapped_out_total += len(known)
        return True

    def swap_in(self, sequence: Sequence, num_tokens: int) -> bool:
        """Swap the computed KV back to the device if blocks for `num_tokens` tokens, and a state slot, are available.

        Return False otherwise: nothing is taken and the sequence stays swapped out.
        """
        hits = self._swapped(sequence)
        on_device = [hit.block for hit in hits if not hit.on_host]
        num_blocks = self._num_blocks_swapped_in(sequence, num_tokens)
        if self.host is None or not hits or not self.has_state_slot:
            return False
        if not self._can_have(num_blocks - len(on_device), beside=on_device):
            return False
        if self.states is not None:
            sequence.kv.state_slot = self.states.swap_in(sequence.kv.state_slot)
        self._take_hits(sequence, hits, sequence.kv.firsts, self.blocks_for(sequence.kv.num_computed))
        self.host.free(sequence.kv.host_blocks)
        sequence.kv.host_blocks = NO_BLOCKS
        self.swapped_in_total += len(hits)
        return True

    def num_blocks_to_swap_in(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the free blocks that `swap_in` takes from the pool, including cached blocks that it shares."""
        return self._num_blocks_swapped_in(sequence, num_tokens) - self._num_in_use(self._swapped(sequence))

    def drop_swapped(self, sequence: Sequence) -> None:
        """Release the host blocks of a swapped-out sequence.

        It is recomputed from the start or from a prefix hit.
        """
        assert not sequence.kv.blocks, "a sequence holds blocks on the device and on the host"
        self.release(sequence)

    def take_copies(self) -> Copies:
        """Return the queued copies, once per plan: run all of `outs`, then all of `ins`, then the forward pass."""
        return Copies([], []) if self.host is None else self.host.take_copies()

    def blank(self, block_hash: bytes) -> bool:
        """Invalidate a cached block on the device, and end its retention unless the host has it too.

        Return False if the device has no cached block with this hash.
        """
        was_there = self.pool.blank(block_hash)
        if was_there and not self.is_on_host(block_hash):
            self.retention.drop(block_hash)
        return was_there

    # ── internal ──

    def _retain_released(self, sequence: Sequence) -> None:
        """Retain the full blocks of a sequence that is released if its request asks for it, and call `on_release`."""
        submit = sequence.request.submit
        if not self.caches(sequence):
            return
        if submit.keep_s > 0:
            hashes, firsts = sequence.block_hashes, sequence.kv.firsts
            retained = [
                (key_of(hashes.at(index, self.block_size), table), 1)
                for index in reversed(range(sequence.kv.num_sealed))  # a head is worth more than its tail
                for table, first in enumerate(firsts)
                if index >= first
            ]
            self.retention.retain(submit.tenant_id, retained, submit.keep_s, submit.tenant_weight)
        self.retention.sweep()
        if self.on_release is not None:
            self.on_release(sequence)

    def _evicted(self, _blocks: ListOf[int], numbers: ListOf[int]) -> ListOf[int]:
        if self.retention or self.states is not None:
            keys = self.pool.contents.hashes_of(numbers)
            for key in keys:
                self.retention.drop(key)
            if self.states is not None:
                self.states.pool.invalidate(keys)
        return numbers

    def _end_retention(self, block_hash: bytes) -> None:
        self.pool.end_retention(block_hash)
        if self.host is not None:
            self.host.pool.end_retention(block_hash)

    def _known_on_host(self, host: HostTier, sequence: Sequence) -> list[int | None]:
        """Return, for each computed device block of the sequence, the host block with its contents, or None."""
        known: list[int | None] = []
        tables = sequence.kv.tables
        for cell in self._computed_cells(sequence):
            key = self._sealed_key(sequence, cell)
            found = None if key is None else host.pool.find(key)
            known.append(host.source_of(tables[cell[0]][cell[1]]) if found is None else found)
        return known

    def _host_places(self, sequence: Sequence) -> list[int | None] | None:
        """Return `_known_on_host` if the host tier has enough free blocks and there is KV to swap out; else None."""
        host, states = self.host, self.states
        if host is None or (states is not None and not states.num_host_free) or sequence.key in self.kv_loads:
            return None
        if sequence.kv.num_computed == 0 or not sequence.kv.blocks:
            return None
        known = self._known_on_host(host, sequence)
        num_revived = sum(block is not None and host.pool.is_free(block) for block in known)
        return known if known.count(None) <= host.pool.num_free - num_revived else None

    def _swapped(self, sequence: Sequence) -> list[Hit]:
        """Return the source of each block of a swapped-out sequence: the device if possible, else the host."""
        hits = []
        for cell, host_block in zip(self._computed_cells(sequence), sequence.kv.host_blocks, strict=False):
            key = self._sealed_key(sequence, cell)
            block = None if key is None else self.pool.find(key)
            hits.append(Hit(host_block, on_host=True) if block is None else Hit(block, on_host=False))
        return hits

    def _num_blocks_swapped_in(self, sequence: Sequence, num_tokens: int) -> int:
        """Return the blocks with which a swapped-out sequence reaches `num_tokens` tokens."""
        num_blocks = self.blocks_for(sequence.kv.num_computed)
        return self.layout.missing_for(num_tokens, num_blocks, sequence.kv.firsts)

    def _num_in_use(self, hits: list[Hit]) -> int:
        return sum(not hit.on_host and not self.pool.is_free(hit.block) for hit in hits)
