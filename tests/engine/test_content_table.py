"""Numbers of the contents that the tiers of a prefix cache share."""

from __future__ import annotations

import pytest

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.content_table import MAX_UNCOUNTED
from moiety_engine.cache.host import HostTier


@pytest.mark.parametrize(("counts_each_time", "most"), [(True, 4 + 3 + 4), (False, 4 + 3 + 4 + MAX_UNCOUNTED)])
def test_numbers_of_contents_that_no_tier_holds_are_used_again(counts_each_time: bool, most: int) -> None:
    device, host = BlockPool(4), HostTier(3)
    host.attach(device)
    for number in range(0, 3 * MAX_UNCOUNTED, 4):
        hashes = [b"%d" % (number + place) for place in range(4)]
        blocks = device.allocate(4)
        for block, block_hash in zip(blocks, hashes, strict=True):
            device.seal(block, block_hash)
        device.free(reversed(blocks))
        assert [device.find(one) for one in hashes] == blocks
        if counts_each_time:
            device.contents.count_removed()
    device.contents.count_removed()
    assert len(device.contents.numbers) == 4 + 3
    assert len(device.contents.hash_of) <= most


def test_contents_keep_their_number_when_they_move_between_tiers() -> None:
    device, host = BlockPool(1), HostTier(1)
    host.attach(device)
    (block,) = device.allocate(1)
    device.seal(block, b"a")
    number = device.contents.numbers[b"a"]
    device.free([block])
    device.allocate(1)
    assert (device.find(b"a"), host.pool.find(b"a")) == (None, 0)
    device.contents.count_removed()
    assert device.contents.numbers == {b"a": number}
