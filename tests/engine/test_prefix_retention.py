"""Prefix-cache retention: retained blocks are evicted last, stay within shares, and block no other request."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.conftest import examples

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.retention import PrefixRetention
from moiety_engine.disk.index import DiskIndex, Stored
from moiety_engine.disk.records import Kept
from moiety_engine.messages import CoreSubmit
from moiety_engine.scheduling.kv.kv_ledger import KvLedger
from moiety_engine.sequence import Sequence
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Sampling


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def cached(pool: BlockPool, *names: bytes) -> None:
    """Return the blocks without a holder, the least recently used first."""
    for name in names:
        (block,) = pool.allocate(1)
        pool.seal(block, name)
        pool.free([block])


def found(pool: BlockPool, *names: bytes) -> list[bytes]:
    return [name for name in names if pool.find(name) is not None]


def test_retained_blocks_are_evicted_last_and_requests_still_get_blocks() -> None:
    pool = BlockPool(4)
    pool.evict_last(kept := {b"a", b"c"}, kept)
    cached(pool, b"a", b"b", b"c", b"d")
    pool.free(pool.allocate(2))
    assert found(pool, b"a", b"b", b"c", b"d") == [b"a", b"c"]
    assert len(pool.allocate(3)) == 3
    assert found(pool, b"a", b"c") == [b"c"]
    assert pool.num_free == 1


def test_blocks_with_ended_retention_are_evicted_next() -> None:
    pool = BlockPool(3)
    pool.evict_last(kept := {b"a"}, kept)
    cached(pool, b"a", b"b", b"c")
    pool.allocate(1)
    pool.evict_last((), ())
    pool.end_retention(b"a")
    pool.allocate(1)
    assert found(pool, b"a", b"b", b"c") == [b"c"]


@settings(max_examples=examples(200), deadline=None)
@given(st.data())
def test_no_block_is_lost_and_nothing_kept_goes_before_anything_else(data: st.DataObject) -> None:
    pool, kept = BlockPool(6), set[bytes]()
    pool.evict_last(kept, kept)
    held: list[int] = []
    names = [bytes([i]) for i in range(8)]
    for _ in range(data.draw(st.integers(1, 40))):
        name = data.draw(st.sampled_from(names))
        action = data.draw(st.sampled_from(["cache", "hold", "give", "keep", "let go"]))
        if action == "keep":
            kept.add(name)
        elif action == "let go":
            kept.discard(name)
            pool.end_retention(name)
        elif action == "give" and held:
            pool.free([held.pop(data.draw(st.integers(0, len(held) - 1)))])
        elif action == "hold" and (block := pool.find(name)) is not None:
            pool.share(block)
            held.append(block)
        elif action == "cache" and pool.num_free:
            free_before = {one for one in names if (block := pool.find(one)) is not None and pool.is_free(block)}
            (block,) = pool.allocate(1)
            gone = free_before - set(found(pool, *names))
            assert not gone & kept or free_before <= kept
            pool.seal(block, name)
            held.append(block)
        assert pool.num_used == len(set(held))
        assert pool.num_cached <= pool.num_free == 6 - len(set(held))
    pool.free(held)
    assert len(set(pool.allocate(6))) == 6


def test_a_tenant_keeps_its_share_of_half_by_weight_and_loses_what_it_kept_longest() -> None:
    gone: list[bytes] = []
    retention: PrefixRetention[bytes] = PrefixRetention(24, end_retention=gone.append, clock=Clock())
    retention.retain("acme", [(bytes([i]), 1) for i in range(20)], 60.0)
    assert gone == [bytes([i]) for i in range(8)]
    retention.retain("globex", [(bytes([100 + i]), 1) for i in range(20)], 60.0, weight=2.0)
    assert retention.size == 12
    assert sum(bytes([i]) in retention for i in range(20)) == 4
    assert sum(bytes([100 + i]) in retention for i in range(20)) == 8


def test_retention_ends_exactly_at_its_time_however_often_it_was_renewed() -> None:
    clock, gone = Clock(), list[bytes]()
    retention: PrefixRetention[bytes] = PrefixRetention(8, end_retention=gone.append, clock=clock)
    retention.retain("t", [(b"a", 1), (b"b", 1)], 3600.0)
    retention.retain("t", [(b"a", 1), (b"c", 1)], 300.0)
    clock.now_s = 301.0
    assert [name for name in (b"a", b"b", b"c") if name in retention] == [b"a", b"b"]
    retention.sweep()
    assert gone == [b"c"]
    clock.now_s = 3700.0
    retention.sweep()
    assert (sorted(gone), retention.size) == ([b"a", b"b", b"c"], 0)


def leave(ledger: KvLedger, first: int, keep_s: float = 0.0) -> Sequence:
    """Run a request of four blocks from its arrival to its end."""
    fields: dict[str, Any] = {"keep_s": keep_s}
    prompt = [first + i for i in range(9)]
    submit = CoreSubmit(first, "t", STANDARD, prompt, Sampling(), 1, 0, [], 1, b"s", 0, **fields)
    sequence = Sequence(submit, order=0, seed=0)
    assert ledger.start(sequence, ledger.find_prefix(sequence), 9)
    assert ledger.grow(sequence, 9)
    sequence.kv.num_computed = 9
    ledger.seal(sequence)
    ledger.release(sequence)
    ledger.take_copies()
    return sequence


def test_a_conversation_that_said_it_comes_back_is_found_after_others_came_and_others_are_not() -> None:
    ledger = KvLedger(BlockPool(16), 2, prefix_caching=True)
    back, other = leave(ledger, 0, keep_s=300.0), leave(ledger, 20)
    for first in range(40, 100, 20):
        leave(ledger, first)
    assert [len(ledger.find_prefix(one)) for one in (back, other)] == [4, 0]


def test_it_is_found_in_host_memory_too() -> None:
    ledger = KvLedger(BlockPool(5), 2, prefix_caching=True, host=HostTier(8))
    back = leave(ledger, 0, keep_s=300.0)
    for first in range(40, 200, 20):
        leave(ledger, first)
    assert [hit.on_host for hit in ledger.find_prefix(back).hits][:2] == [True, True]


def test_files_that_are_kept_are_passed_over_within_half_of_the_disk() -> None:
    index = DiskIndex(100)
    files = [Stored(str(number), 20, (bytes([number]),), b"acme", 0.0) for number in range(9)]
    for stored in files[:4]:
        index.add(stored)
        index.keep(stored, Kept(300.0, 1.0), 0.0)
    gone = [one.name for stored in files[4:] for one in index.add(stored)]
    assert gone == ["0", "1", "4", "5"], "two of them fit half of the disk, the last two"
    assert index.find(bytes([3])) is files[3]


def test_retained_blocks_on_disk_are_deleted_after_the_idle_time() -> None:
    index = DiskIndex(1000)
    kept = Stored("kept", 100, (b"kept",), b"a", 0.0)
    index.add(kept)
    index.keep(kept, Kept(86_400.0, 1.0), 0.0)
    for second in range(1, 200):  # so full that it is skipped again and again
        index.add(Stored(str(second), 100, (b"%d" % second,), b"b", float(second)))
        index.take_unused_since(second - 60.0)
    assert index.find(b"kept") is None


def test_evicted_blocks_do_not_count_against_a_tenants_retention_share() -> None:
    ledger = KvLedger(BlockPool(20), 16, prefix_caching=True)
    first, second = [b"first %d" % place for place in range(5)], [b"second %d" % place for place in range(5)]
    cached(ledger.pool, *first, *second)
    ledger.retention.retain("t", [(one, 1) for one in (*first, *second)], 86_400.0)
    assert all(ledger.blank(one) for one in second)
    cached(ledger.pool, b"third")
    ledger.retention.retain("t", [(b"third", 1)], 86_400.0)
    assert all(one in ledger.retention for one in (*first, b"third"))
    ledger.pool.allocate(20)
    assert ledger.retention.size == 0
