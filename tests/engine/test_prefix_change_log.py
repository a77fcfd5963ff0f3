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
    log, pool, host = PrefixChangeLog(), BlockPool(3), HostTier(2)
    pool.changes = host.pool.changes = log
    pool.on_evict = host.keep
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
    log = PrefixChangeLog()
    root = root_hash("t", b"s")
    log.store(block_hash(root, [number]) for number in range(MAX_BLOCKS_PER_MESSAGE + 5))
    log.store([HASHES[0] + b"further group"])
    assert len((log.take(0) or ([], []))[0]) == MAX_BLOCKS_PER_MESSAGE
    assert log.take(REPORT_INTERVAL_NS - 1) is None
    assert len((log.take(REPORT_INTERVAL_NS) or ([], []))[0]) == 5
    assert log.take(2 * REPORT_INTERVAL_NS) is None
