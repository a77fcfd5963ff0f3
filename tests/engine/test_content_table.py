"""Numbers of the contents that the tiers of a prefix cache share."""

from __future__ import annotations

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.host import HostTier


def test_numbers_of_contents_that_no_tier_holds_are_used_again() -> None:
    device, host = BlockPool(4), HostTier(3)
    host.attach(device)
    for number in range(0, 400, 4):
        hashes = [b"%d" % (number + place) for place in range(4)]
        blocks = device.allocate(4)
        for block, block_hash in zip(blocks, hashes, strict=True):
            device.seal(block, block_hash)
        device.free(reversed(blocks))
        assert [device.find(one) for one in hashes] == blocks
    held = [
        one for one in map(b"%d".__mod__, range(400)) if device.find(one) is not None or host.pool.find(one) is not None
    ]
    assert device.contents.numbers.keys() >= set(held)
    device.contents.count_removed()
    assert len(device.contents.numbers) == 7
    assert len(device.contents.hash_of) <= 4 + 3 + 4


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
