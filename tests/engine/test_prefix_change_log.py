"""Log of the blocks that the prefix cache stores and evicts."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier
from moiety_engine.cache.prefix_change_log import REPORT_INTERVAL_NS, PrefixChangeLog
from moiety_wire.block_hashes import block_hash, root_hash
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, block_name

HASHES = [block_hash(root_hash("t", b"s"), [number]) for number in range(6)]


def cache(pool: BlockPool, block: bytes) -> None:
    blocks = pool.allocate(1)
    pool.seal(blocks[0], block)
    pool.free(blocks)


@given(st.lists(st.tuples(st.sampled_from(["cache", "blank", "forget", "read"]), st.sampled_from(HASHES)), max_size=40))
def test_the_changes_add_up_to_the_contents_of_device_and_host(actions: list[tuple[str, bytes]]) -> None:
    pool, host = BlockPool(3), HostTier(2)
    host.attach(pool)
    log = PrefixChangeLog(pool.contents)
    known: set[int] = set()
    now_ns = 0
    for action, block in [*actions, ("read", HASHES[0])]:
        if action == "cache" and pool.find(block) is None:
            cache(pool, block)
        elif action == "blank":
            pool.blank(block)
        elif action == "forget":
            pool.forget()
        elif action == "read":
            now_ns += REPORT_INTERVAL_NS
            stored, evicted = log.take(now_ns) or ([], [])
            assert not known & set(stored) and set(evicted) <= known
            known = (known - set(evicted)) | set(stored)
            held = {one for one in HASHES if pool.find(one) is not None or host.pool.find(one) is not None}
            assert known == set(map(block_name, held))


def test_changes_are_limited_in_number_and_rate() -> None:
    pool = BlockPool(MAX_BLOCKS_PER_MESSAGE + 6)
    log = PrefixChangeLog(pool.contents)
    root = root_hash("t", b"s")
    for number in range(MAX_BLOCKS_PER_MESSAGE + 5):
        cache(pool, block_hash(root, [number]))
    cache(pool, HASHES[0] + b"further group")
    assert len((log.take(0) or ([], []))[0]) == MAX_BLOCKS_PER_MESSAGE
    assert log.take(REPORT_INTERVAL_NS - 1) is None
    assert len((log.take(REPORT_INTERVAL_NS) or ([], []))[0]) == 5
    assert log.take(2 * REPORT_INTERVAL_NS) is None


def test_a_block_of_two_rank_groups_is_stored_until_both_have_evicted_it() -> None:
    first, second = BlockPool(1), BlockPool(1)
    second.share_contents(first.contents)
    log = PrefixChangeLog(first.contents)
    times = range(0, 5 * REPORT_INTERVAL_NS, REPORT_INTERVAL_NS)
    name, other = block_name(HASHES[0]), block_name(HASHES[1])
    cache(first, HASHES[0])
    assert log.take(times[0]) == ([name], [])
    cache(second, HASHES[0])
    assert log.take(times[1]) is None
    cache(first, HASHES[1])
    assert log.take(times[2]) == ([other], [])
    assert (first.find(HASHES[0]), second.find(HASHES[0])) == (None, 0)
    second.allocate(1)
    assert log.take(times[3]) == ([], [name])
