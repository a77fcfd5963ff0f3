"""Invariants of the block pool: no order of operations loses a block, or frees or shares one twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import examples

from moiety_engine.cache.block_pool import BlockPool, NoFreeBlocks
from moiety_engine.cache.content_table import NOWHERE
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.prefix_change_log import PrefixChangeLog
from moiety_wire.block_hashes import block_hash, root_hash


class PoolMachine(RuleBasedStateMachine):
    """Drives a pool beside a naive model: a multiset of references and the contents that each block was sealed with."""

    @initialize(num_blocks=st.integers(1, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: list[int] = []  # one entry a reference
        self.contents: dict[int, bytes] = {}
        self.unused: list[int] = []  # cached blocks, the one that was used last comes last

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        free_before = self.pool.num_free
        if count > free_before:
            with pytest.raises(NoFreeBlocks):
                self.pool.allocate(count)
            assert self.pool.num_free == free_before
            return
        blocks = self.pool.allocate(count)
        assert len(set(blocks)) == count
        assert not set(blocks) & set(self.held)
        evicted = [block for block in blocks if block in self.contents]
        assert evicted == self.unused[: len(evicted)]
        assert not evicted or self.pool.num_free == self.pool.num_cached
        del self.unused[: len(evicted)]
        for block in blocks:
            self.contents.pop(block, None)
        self.held += blocks

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_one(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(self.held))
        self.held.remove(block)
        self.pool.free([block])
        if block in self.contents and block not in self.held:
            self.unused.append(block)

    @precondition(lambda self: self.unused)
    @rule(times=st.integers(1, 8))
    def hit_all_again_and_again(self, times: int) -> None:
        for _ in range(times):
            for block in self.unused:
                self.pool.share(block)
            self.pool.free(self.unused)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), name=st.integers(0, 5))
    def seal(self, data: st.DataObject, name: int) -> None:
        block, block_hash = data.draw(st.sampled_from(self.held)), bytes([name])
        known = self.pool.find(block_hash)
        self.pool.seal(block, block_hash)
        if known is None and block not in self.contents:
            self.contents[block] = block_hash

    @rule(name=st.integers(0, 5))
    def hit(self, name: int) -> None:
        block = self.pool.find(bytes([name]))
        if block is not None:
            assert self.contents[block] == bytes([name])
            self.pool.share(block)
            self.held.append(block)
            if block in self.unused:
                self.unused.remove(block)

    @invariant()
    def blocks_are_conserved(self) -> None:
        if hasattr(self, "pool"):
            used = len(set(self.held))
            assert self.pool.num_used == used
            assert self.pool.num_free == self.pool.num_blocks - used
            assert self.pool.num_cached == len(self.unused) <= self.pool.num_free


PoolMachine.TestCase.settings = settings(max_examples=examples(60), stateful_step_count=40, deadline=None)
TestBlockPool = PoolMachine.TestCase


def test_blank_blocks_are_taken_before_cached_ones_and_the_least_recently_used_of_those_first() -> None:
    pool = BlockPool(3)
    first, second, third = pool.allocate(3)
    pool.seal(first, b"a")
    pool.seal(second, b"b")
    pool.free([first])
    pool.free([second, third])
    assert pool.allocate(1) == [third]
    assert pool.allocate(1) == [first]
    assert pool.find(b"a") is None
    assert pool.find(b"b") == second


@given(ops=st.lists(st.one_of(st.integers(0, 30), st.just("allocate"), st.just("free")), max_size=120))
def test_new_contents_of_a_free_block_equal_allocating_sealing_and_freeing_it(ops: list[int | str]) -> None:
    pools, held = [BlockPool(6), BlockPool(6)], list[int]()
    for op in ops:
        if op == "allocate":
            if pools[0].num_free:
                (block,), (other,) = (pool.allocate(1) for pool in pools)
                assert block == other
                held.append(block)
        elif op == "free":
            for pool in pools if held else ():
                pool.free([held[0]])
            held = held[1:]
        else:
            block_hash = str(op).encode()
            assert pools[0].find(block_hash) == pools[1].find(block_hash)
            if pools[0].find(block_hash) is not None:
                continue
            pools[0].contents.count_removed()
            number = pools[0].contents.add(block_hash)
            if not pools[0].num_free:
                pools[0].contents.remove_copies((number,))
                pools[0].contents.count_removed()
                assert pools[0].cache_moved([number]) == [NOWHERE]
                continue
            (block,) = pools[1].allocate(1)
            pools[1].seal(block, block_hash)
            pools[1].free([block])
            assert pools[0].cache_moved([number]) == [block]
        assert [pool.num_free for pool in pools] == [6 - len(held)] * 2
        assert pools[0].num_cached == pools[1].num_cached


HASHES = [block_hash(root_hash("t", b"s"), [number]) for number in range(12)]


class Tiers:
    """A device pool above a host tier, whose changes are recorded."""

    def __init__(self, num_blocks: int, num_host_blocks: int) -> None:
        self.device, self.host = BlockPool(num_blocks), HostTier(num_host_blocks)
        self.host.attach(self.device)
        self.log = PrefixChangeLog(self.device.contents)
        self.held_on_host: list[int] = []
        self.kept = frozenset[bytes]()

    def retain(self, kept: frozenset[bytes]) -> None:
        ended, self.kept = self.kept - kept, kept
        for pool in (self.device, self.host.pool):
            pool.evict_last(kept, kept)
        for one in sorted(ended):
            self.device.end_retention(one)
            self.host.pool.end_retention(one)

    def allocate(self, counts: list[int]) -> list[int]:
        return [block for count in counts for block in self.device.allocate(count)]

    def cache(self, blocks: list[int], names: list[int]) -> None:
        for block, name in zip(blocks, names, strict=False):
            self.device.seal(block, HASHES[name])
        self.device.free(reversed(blocks))

    def state(self) -> list[object]:
        pools = self.device, self.host.pool
        return [
            *([pool.find(one) for one in HASHES] for pool in pools),
            *([pool.num_free, pool.num_cached] for pool in pools),
        ]


@settings(max_examples=examples(150), deadline=None)
@given(
    sizes=st.tuples(st.integers(1, 7), st.integers(1, 5)),
    steps=st.lists(
        st.one_of(
            st.tuples(st.just("cache"), st.lists(st.integers(0, 11), min_size=1, max_size=7, unique=True)),
            st.tuples(st.just("retain"), st.lists(st.integers(0, 11), max_size=4, unique=True)),
            st.tuples(st.just("swap"), st.lists(st.integers(0, 11), max_size=1)),
            st.tuples(st.just("read"), st.just([0])),
        ),
        max_size=25,
    ),
)
def test_blocks_that_are_evicted_together_go_where_they_go_one_at_a_time(
    sizes: tuple[int, int], steps: list[tuple[str, list[int]]]
) -> None:
    together, each, now_ns = Tiers(*sizes), Tiers(*sizes), 0
    for step, names in [*steps, ("read", [0])]:
        if step == "retain":
            for tiers in (together, each):
                tiers.retain(frozenset(HASHES[name] for name in names))
        elif step == "swap":  # a sequence takes a host block, or gives it back
            for tiers in (together, each):
                if tiers.held_on_host and not names:
                    tiers.host.free([tiers.held_on_host.pop()])
                elif names and tiers.host.pool.num_free:
                    tiers.held_on_host.append(tiers.host.pool.allocate(1)[0])
        elif step == "read":
            now_ns += 10**9
            reports = [tiers.log.take(now_ns) or ([], []) for tiers in (together, each)]
            assert [set(names) for names in reports[0]] == [set(names) for names in reports[1]]
            assert together.host.take_copies() == each.host.take_copies()
        else:
            count = min(len(names), together.device.num_free)
            blocks = together.allocate([count])
            assert each.allocate([1] * count) == blocks
            for tiers in (together, each):
                tiers.cache(blocks, names)
        assert together.state() == each.state()
