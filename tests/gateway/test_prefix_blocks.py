"""Prefix-cache blocks of replicas, as their engines publish them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.engine_client.prefix_blocks import NUM_SHARDS, SHARDS_A_TURN, PrefixBlocks
from moiety_wire.block_hashes import block_hash, root_hash
from moiety_wire.prefix_events import PrefixEvents, block_name, pack_names, unpack_names

NAMES = st.integers(0, 15)
CHANGES = st.tuples(st.booleans(), st.sets(NAMES), st.sets(NAMES))


def events(
    seq: int, stored: Iterable[int] = (), evicted: Iterable[int] = (), *, is_start: bool = False
) -> PrefixEvents:
    return PrefixEvents(seq, pack_names(stored), pack_names(evicted), is_start)


def blocks_of(*names: int, max_blocks: int = 100) -> PrefixBlocks:
    blocks = PrefixBlocks(max_blocks)
    assert blocks.apply(events(0, names, is_start=True))
    return blocks


def test_the_longest_prefix_ends_at_the_first_missing_block() -> None:
    blocks = blocks_of(1, 2, 3, 5)
    assert [blocks.longest_prefix(names) for names in ([], [9], [1], [1, 2, 9, 3], [1, 2, 3], [2, 1])] == [
        *(0, 0, 1, 2, 3, 2),
    ]


@given(st.integers(0, 40), st.integers(0, 40), st.sets(st.integers(0, 39), max_size=3))
def test_the_estimate_is_exact_without_holes_and_never_below_the_longest_prefix(
    num_cached: int, num_names: int, holes: set[int]
) -> None:
    names = list(range(num_names))
    whole = blocks_of(*range(num_cached))
    assert whole.estimate_prefix(names) == whole.longest_prefix(names) == min(num_cached, num_names)
    with_holes = blocks_of(*(set(range(num_cached)) - holes))
    assert with_holes.longest_prefix(names) <= with_holes.estimate_prefix(names) <= min(num_cached, num_names)


def test_an_evicted_block_ends_the_prefix() -> None:
    blocks = blocks_of(1, 2, 3)
    assert blocks.apply(events(1, evicted=[2]))
    assert blocks.longest_prefix([1, 2, 3]) == 1


def test_blocks_beyond_the_bound_are_not_indexed_until_others_are_evicted() -> None:
    blocks = blocks_of(1, 2, 3, max_blocks=3)
    assert blocks.apply(events(1, [7]))
    assert [name for name in range(10) if name in blocks] == [1, 2, 3]
    assert blocks.apply(events(2, [8, 9], [1, 7]))
    assert [name for name in range(10) if name in blocks] == [2, 3, 8]


def test_names_of_another_tenant_salt_or_adapter_differ() -> None:
    roots = [root_hash("t", b"s"), root_hash("u", b"s"), root_hash("t", b"z"), root_hash("t", b"s", "adapter")]
    assert len({block_name(block_hash(root, range(16))) for root in roots}) == len(roots)


def test_packed_names_of_a_wrong_length_are_refused() -> None:
    assert list(unpack_names(pack_names([0, 2**64 - 1]))) == [0, 2**64 - 1]
    with pytest.raises(ValueError, match="multiple"):
        PrefixBlocks().apply(PrefixEvents(0, b"1234567", is_start=True))


@given(st.lists(st.tuples(CHANGES, st.sampled_from(["once", "twice", "lost"])), max_size=16))
def test_gaps_duplicates_and_restarts_leave_the_blocks_right_or_unknown(
    changes: list[tuple[tuple[bool, set[int], set[int]], str]],
) -> None:
    blocks, held, is_complete = PrefixBlocks(), set[int](), False
    assert not blocks.apply(events(5, [1]))
    for seq, ((is_start, stored, evicted), delivery) in enumerate(changes):
        held = set(stored) if is_start else (held - evicted) | stored
        message = events(seq, stored, () if is_start else evicted - stored, is_start=is_start)
        is_complete = delivery != "lost" and (is_start or is_complete)
        for _ in range({"once": 1, "twice": 2, "lost": 0}[delivery]):
            assert blocks.apply(message) == is_complete
        if delivery != "lost":
            assert blocks.is_known == is_complete
            assert {name for name in range(16) if name in blocks} == (held if is_complete else set())


async def test_dropped_names_are_freed_part_by_part_in_turns_of_the_event_loop() -> None:
    blocks = blocks_of(*range(10 * NUM_SHARDS), max_blocks=10 * NUM_SHARDS)
    shards = blocks._shards
    assert [len(shard) for shard in shards] == [10] * NUM_SHARDS
    assert blocks.apply(events(0, [1], is_start=True)), "a new snapshot replaces the names"
    assert [name for name in range(10 * NUM_SHARDS) if name in blocks] == [1] and len(blocks) == 1
    for num_freed in range(SHARDS_A_TURN, NUM_SHARDS + 1, SHARDS_A_TURN):
        assert len(shards) == NUM_SHARDS - num_freed
        await asyncio.sleep(0)


def test_without_an_event_loop_names_are_dropped_at_once() -> None:
    blocks = blocks_of(1, 2)
    blocks.clear()
    assert not len(blocks) and not blocks.is_known
