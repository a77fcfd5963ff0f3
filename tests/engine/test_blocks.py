"""Invariants of the block pool: no order of operations loses a block, or frees or shares one twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tests.conftest import examples

from moiety_engine.cache.block_pool import BlockPool, NoFreeBlocks


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
            if not pools[0].num_free:
                with pytest.raises(NoFreeBlocks):
                    pools[0].cache_new(block_hash)
                continue
            (block,) = pools[1].allocate(1)
            pools[1].seal(block, block_hash)
            pools[1].free([block])
            assert pools[0].cache_new(block_hash) == block
        assert [pool.num_free for pool in pools] == [6 - len(held)] * 2
        assert pools[0].num_cached == pools[1].num_cached
