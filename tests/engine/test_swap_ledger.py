"""Invariants of the ledger over block pool and host tier: every sequence reads the KV of its own tokens, and no block
is lost.

Blocks are allocated, sealed, shared, evicted, swapped and freed in any order within a step. KV is symbolic: the content
of a slot is the salt and all tokens up to it, so that a read of a wrong block, of a copy not yet run, or of another
tenant's block is a mismatch."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import examples

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.state_slots import StateSlots
from moiety_engine.messages import CoreSubmit
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.scheduling.kv.prefix_search import NO_HITS, Hit, cells_of, held_blocks
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling

BLOCK_SIZE = 2
NUM_HOST_STATES = 2
STORY = [1, 2, 3, 4, 5, 6, 7, 8]

Content = tuple[bytes, int, tuple[int, ...]] | None
LAYOUTS: list[tuple[int | None, ...]] = [(None,), (None, 3), (None, None, 1), (4,), (3, 6)]


def make_sequence(prompt: list[int], *, salt: bytes = b"a") -> Sequence:
    submit = CoreSubmit(0, "t", STANDARD, prompt, Sampling(), 64, 0, [], 64, salt, 0)
    return Sequence(submit, order=0, seed=0)


def content_at(sequence: Sequence, position: int, table: int = 0) -> Content:
    return sequence.request.submit.cache_salt, table, tuple(sequence.tokens[: position + 1])


class Memory:
    """Symbolic device and host memory under a ledger; `step` does what a step of the engine would."""

    def __init__(
        self,
        num_blocks: int,
        num_host_blocks: int,
        *,
        prefix_caching: bool = True,
        windows: tuple[int | None, ...] = (None,),
        num_state_slots: int = 0,
    ) -> None:
        self.host = HostTier(num_host_blocks)
        pool, self.windows = BlockPool(num_blocks), windows
        self.states = StateSlots(num_state_slots, NUM_HOST_STATES) if num_state_slots else None
        caching: dict[str, Any] = {"prefix_caching": prefix_caching, "host": self.host}
        self.kv = KvLedger(pool, BLOCK_SIZE, windows=windows, states=self.states, **caching)
        self.state_content: list[Content] = [None] * (num_state_slots + NUM_HOST_STATES)
        self.device_content: list[list[Content]] = [[None] * BLOCK_SIZE for _ in range(num_blocks)]
        self.host_content: list[list[Content]] = [[None] * BLOCK_SIZE for _ in range(num_host_blocks)]

    def start(self, sequence: Sequence) -> bool:
        num_tokens = len(sequence.tokens)
        return self.kv.start(sequence, self.kv.find_prefix(sequence), num_tokens) and self.kv.grow(sequence, num_tokens)

    def copy(self) -> tuple[int, int]:
        """Runs the queued copies as the runner does: in portions, in any order within `outs` and within `ins`."""
        outs, ins = self.kv.take_copies()
        assert len({host for _, host in outs}) == len(outs), "two copies out have one target"
        assert len({device for _, device in ins}) == len(ins), "two copies in have one target"
        for device, host in reversed(outs):
            self.host_content[host] = list(self.device_content[device])
        for host, device in reversed(ins):
            self.device_content[device] = list(self.host_content[host])
        for source, target in self.kv.take_state_copies():
            self.state_content[target] = self.state_content[source]
        return len(outs), len(ins)

    def compute(self, sequence: Sequence, num_tokens: int) -> None:
        """Write this many of the sequence's next tokens, as far as it has blocks."""
        end = min(sequence.kv.num_computed + num_tokens, len(sequence.tokens), len(sequence.kv.blocks) * BLOCK_SIZE)
        if sequence.kv.snapshot_ends:
            end = min(end, sequence.kv.snapshot_ends[0] * BLOCK_SIZE)
        if self.states is not None and end > sequence.kv.num_computed:
            self.state_content[sequence.kv.state_slot] = content_at(sequence, end - 1)
        for position in range(sequence.kv.num_computed, end):
            block, place = divmod(position, BLOCK_SIZE)
            for number, table in enumerate(sequence.kv.tables):
                assert block >= sequence.kv.firsts[number]
                self.device_content[table[block]][place] = content_at(sequence, position, number)
        sequence.kv.num_computed = max(end, sequence.kv.num_computed)

    def check_reads(self, sequence: Sequence) -> None:
        """Check what the next query reads: all positions in a table without a window, else those in the window."""
        kv, memory = sequence.kv, self.device_content
        if self.states is not None and kv.num_computed:
            assert self.state_content[kv.state_slot] == content_at(sequence, kv.num_computed - 1)
        where = {(number, i): block for number, table in enumerate(kv.tables) for i, block in enumerate(table)}
        if kv.host_blocks:
            cells = cells_of(kv.firsts, self.kv.blocks_for(kv.num_computed))
            memory, where = self.host_content, dict(zip(cells, kv.host_blocks, strict=True))
        for number, window in enumerate(self.windows):
            lowest = 0 if window is None else max(0, kv.num_computed - window + 1)
            for position in range(lowest, kv.num_computed):
                block, place = divmod(position, BLOCK_SIZE)
                assert memory[where[number, block]][place] == content_at(sequence, position, number)


class LedgerMachine(RuleBasedStateMachine):
    """Any operations in any order between steps, more than a scheduler would do to a sequence within one plan."""

    @initialize(
        num_blocks=st.integers(2, 8),
        num_host_blocks=st.integers(1, 7),
        prefix_caching=st.sampled_from([True] * 3 + [False]),
        windows=st.sampled_from(LAYOUTS),
        num_state_slots=st.sampled_from([0, 0, 1, 3, 6]),
    )
    def begin(
        self,
        num_blocks: int,
        num_host_blocks: int,
        prefix_caching: bool,
        windows: tuple[int | None, ...],
        num_state_slots: int,
    ) -> None:
        sizes = num_blocks * len(windows), num_host_blocks * len(windows)
        states = {"num_state_slots": num_state_slots}
        self.memory = Memory(*sizes, prefix_caching=prefix_caching, windows=windows, **states)
        self.kv, self.host = self.memory.kv, self.memory.host
        self.live: list[Sequence] = []

    @precondition(lambda self: len(self.live) < 5)
    @rule(
        salt=st.sampled_from([b"a", b"a", b"b"]), shared=st.integers(0, 8), own=st.lists(st.integers(0, 2), max_size=3)
    )
    def arrive(self, salt: bytes, shared: int, own: list[int]) -> None:
        sequence = make_sequence(STORY[:shared] + own or [0], salt=salt)
        self.live.append(sequence)
        self.memory.start(sequence)

    @precondition(lambda self: any(not s.kv.blocks and not s.kv.host_blocks for s in self.live))
    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if not s.kv.blocks and not s.kv.host_blocks]))
        hits = self.kv.find_prefix(sequence)
        free_before = self.kv.pool.num_free
        needed, has_slot = self.kv.num_blocks_to_start(hits, len(sequence.tokens)), self.kv.has_state_slot
        started = self.kv.start(sequence, hits, len(sequence.tokens))
        assert started == (needed <= free_before and has_slot)
        if started:
            assert sequence.kv.num_computed == len(hits) * BLOCK_SIZE < len(sequence.tokens)
            assert self.kv.grow(sequence, len(sequence.tokens))
            assert self.kv.pool.num_free == free_before - needed
        else:
            assert not sequence.kv.blocks
            assert self.kv.pool.num_free == free_before

    @precondition(lambda self: any(s.kv.blocks for s in self.live))
    @rule(data=st.data(), num_tokens=st.integers(1, 12))
    def grow(self, data: st.DataObject, num_tokens: int) -> None:
        self.kv.grow(data.draw(st.sampled_from([s for s in self.live if s.kv.blocks])), num_tokens)

    @precondition(lambda self: any(s.kv.blocks for s in self.live))
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.kv.blocks]))
        blocks, computed, possible = list(sequence.kv.blocks), sequence.kv.num_computed, self.kv.can_swap_out(sequence)
        num_computed = self.kv.num_computed_blocks(sequence)
        assert self.kv.swap_out(sequence) == possible
        assert sequence.kv.num_computed == computed
        assert sequence.kv.blocks == ([] if possible else blocks)
        assert len(sequence.kv.host_blocks) == (num_computed if possible else 0)

    @precondition(lambda self: any(s.kv.host_blocks for s in self.live))
    @rule(data=st.data(), more=st.integers(0, 3))
    def swap_in(self, data: st.DataObject, more: int) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.kv.host_blocks]))
        computed, free_before = sequence.kv.num_computed, self.kv.pool.num_free
        host_blocks = list(sequence.kv.host_blocks)
        needed, has_slot = self.kv.num_blocks_to_swap_in(sequence, computed + more), self.kv.has_state_slot
        swapped = self.kv.swap_in(sequence, computed + more)
        assert swapped == (needed <= free_before and has_slot)
        assert sequence.kv.num_computed == computed
        assert list(sequence.kv.host_blocks) == ([] if swapped else host_blocks)
        if swapped:
            assert self.kv.grow(sequence, computed + more)
            assert self.kv.pool.num_free == free_before - needed
        else:
            assert self.kv.pool.num_free == free_before

    @precondition(lambda self: any(s.kv.host_blocks for s in self.live))
    @rule(data=st.data())
    def drop_swapped(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from([s for s in self.live if s.kv.host_blocks]))
        self.kv.drop_swapped(sequence)
        assert not sequence.kv.host_blocks
        assert sequence.kv.num_computed == 0

    @precondition(lambda self: self.live)
    @rule(data=st.data(), ends=st.booleans())
    def release(self, data: st.DataObject, ends: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.kv.release(sequence)
        if ends:
            self.live.remove(sequence)

    @rule(mask=st.lists(st.booleans(), min_size=5, max_size=5), num_tokens=st.integers(1, 8), token=st.integers(0, 1))
    def step(self, mask: list[bool], num_tokens: int, token: int) -> None:
        self.memory.copy()
        running = [s for s, runs in zip(self.live, mask, strict=False) if s.kv.blocks and runs]
        for sequence in running:
            self.memory.compute(sequence, num_tokens)
        for sequence in running:
            self.kv.seal(sequence)
            if sequence.kv.num_computed == len(sequence.tokens):
                sequence.tokens.append(token)
        for sequence in self.live:
            self.memory.check_reads(sequence)
        assert self.host.pool.num_used == len({block for s in self.live for block in s.kv.host_blocks})

    @invariant()
    def blocks_are_conserved(self) -> None:
        if not hasattr(self, "live"):
            return
        pool, host = self.kv.pool, self.host
        assert pool.num_used == len({block for s in self.live for block in held_blocks(s.kv)})
        states = self.memory.states
        num_slots = 0 if states is None else states.num_slots
        slots = [s.kv.state_slot for s in self.live if 0 <= s.kv.state_slot < num_slots]
        hosted = [s.kv.state_slot for s in self.live if s.kv.state_slot >= max(1, num_slots)]
        assert len(set(hosted)) == len(hosted) == (0 if states is None else NUM_HOST_STATES - states.num_host_free)
        assert states is None or states.pool.num_used == len(set(slots)) == len(slots)
        assert all(s.kv.num_held == len(held_blocks(s.kv)) for s in self.live)
        sources = {host.source_of(block) for block in range(pool.num_blocks)} - {None}
        assert host.pool.num_used == len({block for s in self.live for block in s.kv.host_blocks} | sources)
        assert host.pool.num_used + host.pool.num_cached + host.pool.num_blank == host.pool.num_blocks
        assert all(not (s.kv.blocks and s.kv.host_blocks) for s in self.live)

    def teardown(self) -> None:
        if hasattr(self, "live"):
            for sequence in self.live:
                self.kv.release(sequence)
            self.kv.take_copies()
            assert self.kv.pool.num_used == self.host.pool.num_used == 0
            assert self.memory.states is None or self.memory.states.pool.num_used == 0


LedgerMachine.TestCase.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)
TestKvLedger = LedgerMachine.TestCase


def computed(memory: Memory, prompt: list[int], *, salt: bytes = b"a") -> Sequence:
    """A sequence whose prompt is computed and sealed."""
    sequence = make_sequence(prompt, salt=salt)
    assert memory.start(sequence)
    memory.copy()
    memory.compute(sequence, len(prompt))
    memory.kv.seal(sequence)
    return sequence


def test_a_swapped_sequence_comes_back_with_all_it_had_computed_after_others_used_its_blocks() -> None:
    memory = Memory(4, 4)
    victim = computed(memory, [1, 2, 3, 4, 5, 6, 7])
    assert memory.kv.swap_out(victim)
    other = computed(memory, [9, 9, 9, 9, 9, 9, 9])
    assert not memory.kv.swap_in(victim, 8)
    memory.kv.release(other)
    assert memory.kv.swap_in(victim, 8)
    assert memory.copy() == (0, 4)
    assert victim.kv.num_computed == 7
    memory.check_reads(victim)


def test_a_returned_sequences_prefix_is_shared_again() -> None:
    memory = Memory(4, 8)
    victim = computed(memory, [1, 2, 3, 4, 5])
    memory.kv.swap_out(victim)
    memory.kv.release(computed(memory, [9] * 8))
    memory.kv.swap_in(victim, 5)
    hits = memory.kv.find_prefix(make_sequence([1, 2, 3, 4, 8]))
    assert hits.hits == [Hit(block, on_host=False) for block in victim.kv.blocks[:2]]


def test_a_returning_sequence_takes_what_is_still_on_the_device_without_a_copy() -> None:
    memory = Memory(8, 8)
    victim = computed(memory, [1, 2, 3, 4, 5])
    memory.kv.swap_out(victim)
    assert memory.copy() == (3, 0)
    assert memory.kv.swap_in(victim, 5)
    assert memory.copy() == (0, 1)  # the half-full block; the full ones had not been evicted
    memory.check_reads(victim)


def test_a_prefix_shared_by_two_swapped_sequences_is_copied_once_and_held_until_both_are_back() -> None:
    memory = Memory(8, 4)
    first, second = computed(memory, [1, 2, 3, 4, 5]), computed(memory, [1, 2, 3, 4, 6])
    assert memory.kv.swap_out(first)
    assert memory.kv.num_to_copy_out(second) == 1
    assert memory.kv.swap_out(second)
    assert memory.copy() == (4, 0)
    assert memory.host.pool.num_used == 4
    memory.kv.drop_swapped(first)
    assert memory.host.pool.num_used == 3
    memory.check_reads(second)


def test_a_sequence_may_leave_again_in_the_plan_that_brought_it_back() -> None:
    memory = Memory(4, 5)
    victim = computed(memory, [1, 2, 3, 4, 5, 6, 7])
    assert memory.kv.swap_out(victim)
    memory.kv.release(computed(memory, [9] * 8))
    host_blocks = list(victim.kv.host_blocks)
    assert memory.kv.swap_in(victim, 8)
    assert memory.kv.swap_out(victim)
    assert victim.kv.host_blocks == host_blocks
    memory.copy()
    memory.check_reads(victim)


def test_an_evicted_prefix_is_hit_on_the_host() -> None:
    memory = Memory(2, 4)
    memory.kv.release(computed(memory, [1, 2, 3, 4]))
    memory.kv.release(computed(memory, [5, 6, 7, 8]))
    again = make_sequence([1, 2, 3])
    hits = memory.kv.find_prefix(again)
    assert [hit.on_host for hit in hits.hits] == [True]
    assert memory.kv.start(again, hits, 3)
    assert memory.copy()[1] == 1
    assert again.kv.num_computed == 2
    memory.check_reads(again)


def test_another_tenant_does_not_hit_an_evicted_prefix() -> None:
    memory = Memory(2, 4)
    memory.kv.release(computed(memory, [1, 2, 3, 4], salt=b"a"))
    memory.kv.release(computed(memory, [5, 6, 7, 8], salt=b"a"))
    assert len(memory.kv.find_prefix(make_sequence([1, 2, 3], salt=b"b"))) == 0
    assert len(memory.kv.find_prefix(make_sequence([1, 2, 3], salt=b"a"))) == 1


def test_a_half_computed_block_is_not_hit_by_the_hash_it_will_have() -> None:
    memory = Memory(8, 8)
    victim = make_sequence([1, 2, 3, 4, 5])
    assert memory.start(victim)
    memory.compute(victim, 3)
    memory.kv.seal(victim)
    assert memory.kv.swap_out(victim)
    assert len(memory.kv.find_prefix(make_sequence([1, 2, 3, 4, 5]))) == 1


def test_a_swapped_sequence_evicts_kept_prefixes_and_is_not_evicted_by_them() -> None:
    memory = Memory(4, 2)
    for start in (0, 10, 20):
        memory.kv.release(computed(memory, [start + i for i in range(8)]))
    assert (memory.host.pool.num_cached, memory.host.pool.num_used) == (2, 0)
    victim = computed(memory, [40, 41, 42, 43])
    assert memory.kv.swap_out(victim)
    assert (memory.host.pool.num_cached, memory.host.pool.num_used) == (0, 2)
    for start in (50, 60):
        memory.kv.release(computed(memory, [start + i for i in range(8)]))
    assert memory.host.pool.num_used == 2
    memory.check_reads(victim)


def test_a_full_host_tier_refuses_and_changes_nothing() -> None:
    memory = Memory(8, 3)
    first, second = computed(memory, [1, 2, 3, 4, 5]), computed(memory, [6, 7, 8])
    assert memory.kv.swap_out(first)
    assert not memory.kv.can_swap_out(second)
    assert not memory.kv.swap_out(second)
    assert second.kv.blocks
    assert not second.kv.host_blocks


def test_without_a_host_tier_nothing_is_swapped_and_nothing_copied() -> None:
    kv = KvLedger(BlockPool(2), BLOCK_SIZE, prefix_caching=True)
    sequence = make_sequence([1, 2, 3])
    assert kv.start(sequence, NO_HITS, 3)
    assert kv.grow(sequence, 3)
    sequence.kv.num_computed = 3
    kv.seal(sequence)
    assert not kv.swap_out(sequence)
    kv.release(sequence)
    assert kv.take_copies() == ([], [])
