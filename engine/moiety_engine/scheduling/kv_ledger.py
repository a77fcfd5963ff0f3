"""Blocks for sequences: prefix hits, growth, sealing, swapping and return, on top of the pool and the host tier.

A sequence holds device blocks (`blocks`), or, swapped out, host blocks (`host_blocks`), never both; its `num_computed`
tokens stand in whichever it holds. Copies between the two are queued as blocks change hands; whoever plans a step takes
them with `take_copies` once a plan and has them run before the step's forward pass, also when the step is empty. What
comes from other engines lands after them: `take_landings`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from moiety_engine.cache.blocks import BlockPool
from moiety_engine.cache.host import Copies, HostTier
from moiety_engine.cache.prefix import MARK_BYTES
from moiety_engine.cache.retention import PrefixRetention
from moiety_engine.scheduling.plan import KvLoad
from moiety_engine.sequence import Sequence


class Hit(NamedTuple):
    """A cached block of a prefix: on the device, or on the host, whence it takes a device block and a copy."""

    block: int
    on_host: bool


class KvLedger:
    """Who holds which blocks. The only place that moves blocks between pool, host tier and sequences."""

    def __init__(
        self,
        pool: BlockPool,
        block_size: int,
        *,
        prefix_caching: bool,
        host: HostTier | None = None,
        answers_apart: bool = False,
    ) -> None:
        """`answers_apart`: an answer's KV is no prefix of another prompt, because a prompt's has other bits."""
        self.pool = pool
        self.answers_apart = answers_apart
        self.block_size = block_size
        self.host = host
        self.swapped_out_total = 0  # blocks of sequences, those that needed no copy included
        self.swapped_in_total = 0
        self.host_hit_blocks_total = 0  # of prefixes, found on the host
        self.on_release: Callable[[Sequence], None] | None = None  # called with a sequence before it gives up blocks
        self._prefix_caching = prefix_caching
        self._forgotten: frozenset[bytes] = frozenset()  # marks of tenants that leave nothing behind
        self._landings: dict[int, KvLoad] = {}  # queued, by the sequences' keys
        self.pins: PrefixRetention[bytes] = PrefixRetention(pool.num_blocks, let_go=self._let_go)
        pool.kept = self.pins
        if host is not None:
            pool.on_evict = host.keep
            host.keep_longest(self.pins)
        else:
            pool.on_evict = lambda _block, block_hash: self.pins.drop(block_hash)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ── prefixes ──

    def find_prefix(self, sequence: Sequence) -> list[Hit]:
        """The longest run of cached blocks that the sequence starts with; its last token is always left to compute.
        What was found may be gone once blocks have been allocated to others."""
        hits: list[Hit] = []
        if self._reads_cache(sequence):
            for index in range((len(sequence.tokens) - 1) // self.block_size):
                hit = self._find(sequence.hash_at(index, self.block_size))
                if hit is None:
                    break
                hits.append(hit)
        return hits

    @property
    def caches_prefixes(self) -> bool:
        return self._prefix_caching

    def num_on_device(self, hashes: list[bytes]) -> int:
        """How many of these blocks, from the first on, the device has."""
        for index, block_hash in enumerate(hashes):
            if self.pool.find(block_hash) is None:
                return index
        return len(hashes)

    def is_on_host(self, block_hash: bytes) -> bool:
        return self.host is not None and self.host.find(block_hash) is not None

    def _reads_cache(self, sequence: Sequence) -> bool:
        """Not one whose prompt is scored: all of it is computed."""
        return self.caches(sequence) and sequence.submit.sampling.num_prompt_logprobs is None

    def caches(self, sequence: Sequence) -> bool:
        """Whether what is computed of it may be found again."""
        return self._prefix_caching and not (self._forgotten and sequence.mark in self._forgotten)

    def next_hash(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """The hash of the first block that the sequence must compute, if that block will be full and shareable."""
        if not self._reads_cache(sequence) or (num_hits + 1) * self.block_size >= len(sequence.tokens):
            return None
        return sequence.hash_at(num_hits, self.block_size)

    def start(self, sequence: Sequence, hits: list[Hit], num_tokens: int) -> bool:
        """Share the prefix `hits`, if blocks for `num_tokens` tokens in all can be had. False: nothing taken."""
        on_device = [hit.block for hit in hits if not hit.on_host]
        if not self._can_have(self.blocks_for(num_tokens) - len(on_device), beside=on_device):
            return False
        sequence.num_sealed = len(hits)
        sequence.blocks = self._bring_in(sequence, hits)
        sequence.num_computed = len(hits) * self.block_size
        self.host_hit_blocks_total += len(hits) - len(on_device)
        return True

    def num_blocks_to_start(self, hits: list[Hit], num_tokens: int) -> int:
        """Free blocks that `start` and growth to `num_tokens` take from the pool: hits on the host need one each, and
        hits that nobody uses stop being free."""
        in_use = sum(not hit.on_host and not self.pool.is_free(hit.block) for hit in hits)
        return self.blocks_for(num_tokens) - in_use

    def land(self, sequence: Sequence) -> None:
        """After `start`: what came for the sequence from another engine goes into its blocks, but for what its prefix
        hits have."""
        first, end = sequence.num_computed, sequence.num_landing
        sequence.num_landing = 0
        if end <= first:
            return
        grown = self.grow(sequence, end)
        assert grown, "a sequence was started without blocks for all its tokens"
        self._landings[sequence.key] = KvLoad(sequence.key, first, sequence.blocks[: self.blocks_for(end)])
        sequence.num_computed = sequence.peak_computed = end
        sequence.num_landed = end - first

    def take_landings(self) -> list[KvLoad]:
        """What must land, once a plan, after the copies."""
        landings, self._landings = list(self._landings.values()), {}
        return landings

    # ── contents from elsewhere ──

    def holds(self, block_hash: bytes) -> bool:
        """Whether a block has these contents, on the device or on the host."""
        return self._find(block_hash) is not None

    def adopt(self, hashes: list[bytes]) -> dict[bytes, int]:
        """Device blocks for contents with these hashes, but for those that are on the device, and as many as are free,
        the first first. The caller fills them after `take_copies` has run, before anything else is planned, and gives
        them back with `adopted`."""
        wanted = [one for one in dict.fromkeys(hashes) if one[:MARK_BYTES] not in self._forgotten]
        missing = [one for one in wanted if self.pool.find(one) is None]
        blocks = self.pool.allocate(min(len(missing), self.pool.num_free))
        taken = dict(zip(missing, blocks, strict=False))
        for block_hash, block in taken.items():
            self.pool.seal(block, block_hash)
        return taken

    def adopted(self, taken: dict[bytes, int]) -> None:
        """They are filled: nobody holds them, and whoever begins so finds them."""
        self.pool.free(reversed(taken.values()))

    def refresh(self, hits: list[Hit]) -> None:
        """A prefix that is wanted soon is the last to be evicted, its tail before its head."""
        for hit in reversed(hits):
            if not hit.on_host:
                self.pool.share(hit.block)
                self.pool.free([hit.block])
            elif self.host is not None:
                self.host.share(hit.block)
                self.host.free([hit.block])

    # ── growth ──

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens in all. False where too few are free: nothing taken."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        sequence.blocks.extend(self.pool.allocate(missing))
        return True

    def grow_each(self, sequences: list[Sequence]) -> None:
        """One more block for each; the caller has seen to it that so many are free."""
        for sequence, block in zip(sequences, self.pool.allocate(len(sequences)), strict=True):
            sequence.blocks.append(block)

    def room_tokens(self, sequence: Sequence) -> int:
        """How many tokens the sequence could hold in all if it took every free block."""
        return (len(sequence.blocks) + self.pool.num_free) * self.block_size

    def completed_hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """The hashes of blocks that become full when the first `num_tokens` tokens are computed."""
        if not self.caches(sequence):
            return []
        full = num_tokens // self.block_size
        return sequence.hashes_between(sequence.num_sealed, full, self.block_size)

    def seal(self, sequence: Sequence) -> None:
        """Publish the blocks that are full by now."""
        for block_hash in self.completed_hashes(sequence, sequence.num_computed):
            self.pool.seal(sequence.blocks[sequence.num_sealed], block_hash)
            sequence.num_sealed += 1

    def num_unshared(self, sequence: Sequence) -> int:
        """Device blocks that would be free if the sequence gave up its own."""
        return sum(not self.pool.is_shared(block) for block in sequence.blocks)

    def release(self, sequence: Sequence) -> None:
        """All blocks back, on the device and on the host; what was computed is forgotten, but may still be hit by its
        hashes."""
        if self._landings.pop(sequence.key, None) is not None:  # it has not come into them yet, and still may
            sequence.num_landing = sequence.num_computed
        elif sequence.num_sealed:
            self._leave_behind(sequence)
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        if self.host is not None:
            self.host.free(sequence.host_blocks)
        sequence.host_blocks = []
        sequence.num_sealed = 0
        sequence.num_computed = 0

    def put_back(self, sequence: Sequence, num_shared: int, num_own: int) -> None:
        """`release` for what was computed unasked: nothing that others have cached is evicted later, or sooner, for it.
        The first `num_shared` blocks were hits; of those after them, `num_own` are evicted in their turn, and others
        first."""
        shared, new = sequence.blocks[:num_shared], sequence.blocks[num_shared:]
        self.pool.put_back(reversed(shared))
        self.pool.put_back(reversed(new[:num_own]))
        self.pool.put_back(new[num_own:], first=True)
        sequence.blocks = []
        sequence.num_sealed = sequence.num_computed = 0

    def forget_tenants(self, marks: frozenset[bytes]) -> int:
        """What these tenants have left is found no more, and what they still compute is not cached; how many blocks
        that were."""
        self._forgotten |= marks
        invalidated = self.pool.invalidate_marked(marks)
        invalidated += [] if self.host is None else self.host.invalidate_marked(marks)
        for block_hash in invalidated:
            self.pins.drop(block_hash)
        return len(invalidated)

    def invalidate(self, sequence: Sequence) -> list[bytes]:
        """Forget what the full blocks of a sequence hold, on the device and on the host: nobody else may begin with
        them. Its blocks stay with it. Return the hashes that they had."""
        if not self.caches(sequence):
            return []
        num_full = min(sequence.peak_computed, sequence.num_known) // self.block_size
        hashes = sequence.hashes_between(0, num_full, self.block_size)
        self.pool.invalidate(hashes)
        if self.host is not None:
            self.host.invalidate(hashes)
        for block_hash in hashes:
            self.pins.drop(block_hash)
        sequence.num_sealed = 0  # so that nothing of it is offered to the disk
        return hashes

    def forget(self) -> None:
        """The cache's contents are lost, on the device and on the host. No sequence holds any."""
        self.pins.forget()
        self.pool.forget()
        if self.host is not None:
            self.host.forget()

    # ── the host tier ──

    def can_swap_out(self, sequence: Sequence) -> bool:
        """Whether the sequence has something computed on the device and the host tier has room for it."""
        return self._host_places(sequence) is not None

    def num_to_copy_out(self, sequence: Sequence) -> int:
        """Blocks that swapping out would copy: those whose contents the host tier lacks. Swapping in copies at most
        all `blocks_for(num_computed)`, less what the device still has by its hash."""
        return 0 if self.host is None else self._known_on_host(self.host, sequence).count(None)

    def swap_out(self, sequence: Sequence) -> bool:
        """Everything computed to the host, every device block back. Nothing is forgotten: `num_computed` stands.
        Prefix blocks that others share go along by reference, and stay where they are for those others. False where
        `can_swap_out` is: nothing changed."""
        host, known = self.host, self._host_places(sequence)
        if host is None or known is None:
            return False
        for host_block in known:
            if host_block is not None:
                host.share(host_block)  # before any allocation, which might evict it
        sequence.host_blocks = [
            host.take(sequence.blocks[index], self._sealed_hash(sequence, index)) if host_block is None else host_block
            for index, host_block in enumerate(known)
        ]
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        self.swapped_out_total += len(known)
        return True

    def swap_in(self, sequence: Sequence, num_tokens: int) -> bool:
        """Back to the device with all that was computed, if blocks for `num_tokens` tokens in all can be had. False:
        nothing taken, still swapped out."""
        hits = self._swapped(sequence)
        on_device = [hit.block for hit in hits if not hit.on_host]
        num_blocks = max(self.blocks_for(num_tokens), len(hits))
        if self.host is None or not hits or not self._can_have(num_blocks - len(on_device), beside=on_device):
            return False
        sequence.blocks = self._bring_in(sequence, hits)
        self.host.free(sequence.host_blocks)
        sequence.host_blocks = []
        self.swapped_in_total += len(hits)
        return True

    def num_blocks_to_swap_in(self, sequence: Sequence, num_tokens: int) -> int:
        """Free blocks that `swap_in` takes from the pool, cached ones that it shares included."""
        hits = self._swapped(sequence)
        return self.num_blocks_to_start(hits, max(num_tokens, len(hits) * self.block_size))

    def drop_swapped(self, sequence: Sequence) -> None:
        """Give up what was swapped out: the host blocks back, to be computed again from the start or from a hit."""
        assert not sequence.blocks, "a sequence holds blocks on the device and on the host"
        self.release(sequence)

    def take_copies(self) -> Copies:
        """What must be copied, once a plan: first all of `outs`, then all of `ins`, then the forward pass."""
        return Copies([], []) if self.host is None else self.host.take_copies()

    def blank(self, block_hash: bytes) -> bool:
        """Forget a cached block of the device, which is kept no more unless the host has it, too. False where there is
        none."""
        was_there = self.pool.blank(block_hash)
        if was_there and not self.is_on_host(block_hash):
            self.pins.drop(block_hash)
        return was_there

    # ── within ──

    def _leave_behind(self, sequence: Sequence) -> None:
        """What is full of a sequence that gives up its blocks may be wanted again, and is kept if that was said."""
        submit = sequence.submit
        if not self.caches(sequence):
            return
        if submit.keep_s > 0:
            hashes = sequence.hashes_between(0, sequence.num_sealed, self.block_size)
            pinned = [(block_hash, 1) for block_hash in reversed(hashes)]  # a head is worth more than its tail
            self.pins.pin(submit.tenant_id, pinned, submit.keep_s, submit.tenant_weight)
        self.pins.sweep()
        if self.on_release is not None:
            self.on_release(sequence)

    def _let_go(self, block_hash: bytes) -> None:
        self.pool.let_go(block_hash)
        if self.host is not None:
            self.host.let_go(block_hash)

    def _find(self, block_hash: bytes) -> Hit | None:
        block = self.pool.find(block_hash)
        if block is not None:
            return Hit(block, on_host=False)
        block = None if self.host is None else self.host.find(block_hash)
        return None if block is None else Hit(block, on_host=True)

    def _sealed_hash(self, sequence: Sequence, index: int) -> bytes | None:
        is_sealed = index < sequence.num_sealed and self.caches(sequence)
        return sequence.hash_at(index, self.block_size) if is_sealed else None

    def _known_on_host(self, host: HostTier, sequence: Sequence) -> list[int | None]:
        """For each computed device block of the sequence, the host block that has its contents."""
        known: list[int | None] = []
        for index in range(self.blocks_for(sequence.num_computed)):
            block_hash = self._sealed_hash(sequence, index)
            found = None if block_hash is None else host.find(block_hash)
            known.append(host.source_of(sequence.blocks[index]) if found is None else found)
        return known

    def _host_places(self, sequence: Sequence) -> list[int | None] | None:
        """`_known_on_host`, if the host tier has room for the rest and there is anything to swap."""
        host = self.host
        if host is None or sequence.num_computed == 0 or not sequence.blocks or sequence.key in self._landings:
            return None
        known = self._known_on_host(host, sequence)
        num_revived = sum(block is not None and host.is_free(block) for block in known)
        return known if known.count(None) <= host.num_free - num_revived else None

    def _swapped(self, sequence: Sequence) -> list[Hit]:
        """Where the contents of a swapped sequence are to be had, block by block; on the device if still there."""
        hits = []
        for index, host_block in enumerate(sequence.host_blocks):
            block_hash = self._sealed_hash(sequence, index)
            block = None if block_hash is None else self.pool.find(block_hash)
            hits.append(Hit(host_block, on_host=True) if block is None else Hit(block, on_host=False))
        return hits

    def _can_have(self, num_new: int, *, beside: list[int]) -> bool:
        """Whether so many blocks can be allocated once the blocks `beside` are shared."""
        num_revived = sum(self.pool.is_free(block) for block in beside)
        return num_new <= self.pool.num_free - num_revived

    def _bring_in(self, sequence: Sequence, hits: list[Hit]) -> list[int]:
        """A reference to each hit on the device, a new block and a queued copy for each on the host."""
        from_host = [hit.block for hit in hits if hit.on_host]
        for hit in hits:
            if not hit.on_host:
                self.pool.share(hit.block)
        if self.host is None:
            return [hit.block for hit in hits]
        for host_block in from_host:
            self.host.share(host_block)  # before the allocation, which might evict it
        new = iter(self.pool.allocate(len(from_host)))
        blocks = []
        for index, hit in enumerate(hits):
            block = hit.block
            if hit.on_host:
                block = next(new)
                self.host.fill(hit.block, block)
                block_hash = self._sealed_hash(sequence, index)
                if block_hash is not None:
                    self.pool.seal(block, block_hash)  # whoever finds it runs after the copy
            blocks.append(block)
        self.host.free(from_host)
        return blocks
