"""Host-memory tier below the block pool: the contents of the host blocks, and the copies to and from the device.

A host block is *used* (held by swapped-out sequences, or the source of a copy that has not run), *cached* (an evicted
prefix block that its hash may still hit) or *blank*; used + cached + blank = num_blocks, always. Swapped sequences take
precedence: they evict cached blocks, least recently used first, and cached blocks never evict them. Blocks with equal
hashes hold equal contents, so two sequences with one prefix share its host blocks and no hash is copied out twice.

Copies are queued while a step is planned and run before its forward pass, all copies out before all copies in. These
rules keep the order correct:

- A copy out reads a device block as it was before the step. The device block may be reassigned at once.
- A copy in holds a reference to its host block until the queue is taken, so that no copy out overwrites its source.
- A copy out never reads a device block that a queued copy in will fill: the content is taken from the host block.
- A device block has one queued copy in, the newest. If the block was reassigned after an older copy was queued, the
  result of that copy would be overwritten anyway.

The tier knows only ids and hashes; the runner moves the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moiety_engine.cache.block_pool import BlockPool
from moiety_engine.cache.content_table import NOWHERE


class Copies(NamedTuple):
    """Copies to run before a step's forward pass: all of `outs`, then all of `ins`. Targets are distinct in each."""

    outs: list[tuple[int, int]]  # (device block, host block)
    ins: list[tuple[int, int]]  # (host block, device block)


class HostTier:
    """Owner of the queued copies and of `pool`, whose blocks are the host blocks 0 … num_blocks-1.

    Single-threaded, like the pool of the device's blocks above it. To the pool's cached contents, retention and counts
    callers have direct access; blocks get contents only here, with the copies that fill them.
    """

    def __init__(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self._out_to: dict[int, int] = {}  # host block → device block
        self._in_to: dict[int, int] = {}  # device block → host block, which is referenced
        self.copied_out_total = 0
        self.copied_in_total = 0

    def source_of(self, device_block: int) -> int | None:
        """Return the host block from which a queued copy will fill this device block."""
        return self._in_to.get(device_block)

    def free(self, host_blocks: Sequence[int]) -> None:
        """Drop one reference to each block, the tail of a prefix before its head."""
        self.pool.free(reversed(host_blocks))

    def take(self, device_block: int, block_hash: bytes | None) -> int:
        """Queue a copy of this device block and return its host block, with one reference.

        A block with a hash can be found by it. Raises NoFreeBlocks. The caller has checked that the hash is not present
        and that no copy in is queued for the block.
        """
        assert device_block not in self._in_to, f"device block {device_block} has no contents yet"
        (host_block,) = self.pool.allocate(1)
        if block_hash is not None:
            assert self.pool.find(block_hash) is None, "a hash is copied out twice"
            self.pool.seal(host_block, block_hash)
        self._out_to[host_block] = device_block
        return host_block

    def attach(self, pool: BlockPool) -> None:
        """Keep what the pool evicts from now on. Call it while the pool holds no contents."""
        pool.share_contents(self.pool.contents)
        pool.on_evict = self._keep

    def fill(self, host_block: int, device_block: int) -> None:
        """Queue a copy in. Takes its own reference to the host block."""
        self.pool.share(host_block)
        before = self._in_to.get(device_block)
        self._in_to[device_block] = host_block
        if before is not None:
            self.pool.free([before])

    def forget(self) -> None:
        """Drop all contents and queued copies. No block may be used."""
        self.pool.forget()
        self._out_to, self._in_to = {}, {}

    def take_copies(self) -> Copies:
        """Return the queued copies and clear the queue. They must run, in order, before those of the next call."""
        copies = Copies(list(zip(self._out_to.values(), self._out_to, strict=True)), [])
        if self._in_to:
            copies.ins.extend(zip(self._in_to.values(), self._in_to, strict=True))
            self.pool.free(self._in_to.values())
            self._in_to = {}
            self.copied_in_total += len(copies.ins)
        self._out_to = {}
        self.copied_out_total += len(copies.outs)
        return copies

    def _keep(self, device_blocks: Sequence[int], numbers: Sequence[int]) -> Sequence[int]:
        """Keep the contents of prefix blocks that the pool evicts, given by their numbers, if a host block is free.

        Return the numbers of which there is no new copy: those that the host already had, or had no block for.
        """
        host_blocks = self.pool.cache_moved(numbers)
        if NOWHERE not in host_blocks:
            assert not self._in_to or self._in_to.keys().isdisjoint(device_blocks), (
                "an evicted device block has no contents yet"
            )
            self._out_to.update(zip(host_blocks, device_blocks, strict=True))
            return ()
        not_kept = []
        for device_block, host_block, number in zip(device_blocks, host_blocks, numbers, strict=True):
            if host_block < 0:
                not_kept.append(number)
            else:
                assert device_block not in self._in_to, f"device block {device_block} has no contents yet"
                self._out_to[host_block] = device_block
        return not_kept
