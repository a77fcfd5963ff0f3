"""Blocks for sequences: prefix hits, growth, sealing and return, on top of the pool."""

from __future__ import annotations

from moiety_engine.cache.blocks import BlockPool
from moiety_engine.sequence import Sequence


class KvLedger:
    """Who holds which blocks. The only place that moves blocks between pool and sequences."""

    def __init__(self, pool: BlockPool, block_size: int, *, prefix_caching: bool) -> None:
        self.pool = pool
        self.block_size = block_size
        self._prefix_caching = prefix_caching

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """The longest run of cached blocks that the sequence starts with; its last token is always left to compute."""
        hits: list[int] = []
        if self._prefix_caching:
            for index in range((len(sequence.tokens) - 1) // self.block_size):
                block = self.pool.find(sequence.hash_at(index, self.block_size))
                if block is None:
                    break
                hits.append(block)
        return hits

    def next_hash(self, sequence: Sequence, num_hits: int) -> bytes | None:
        """The hash of the first block that the sequence must compute, if that block will be full and shareable."""
        if not self._prefix_caching or (num_hits + 1) * self.block_size >= len(sequence.tokens):
            return None
        return sequence.hash_at(num_hits, self.block_size)

    def start(self, sequence: Sequence, hits: list[int], num_tokens: int) -> bool:
        """Share the prefix `hits`, if blocks for `num_tokens` tokens in all can be had. False: nothing taken."""
        num_revived = sum(self.pool.is_free(block) for block in hits)
        if self.blocks_for(num_tokens) - len(hits) > self.pool.num_free - num_revived:
            return False
        for block in hits:
            self.pool.share(block)
        sequence.blocks = list(hits)
        sequence.num_sealed = len(hits)
        sequence.num_computed = len(hits) * self.block_size
        return True

    def grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Blocks for `num_tokens` tokens in all. False where too few are free: nothing taken."""
        missing = self.blocks_for(num_tokens) - len(sequence.blocks)
        if missing <= 0:
            return True
        if missing > self.pool.num_free:
            return False
        sequence.blocks.extend(self.pool.allocate(missing))
        return True

    def room_tokens(self, sequence: Sequence) -> int:
        """How many tokens the sequence could hold in all if it took every free block."""
        return (len(sequence.blocks) + self.pool.num_free) * self.block_size

    def completed_hashes(self, sequence: Sequence, num_tokens: int) -> list[bytes]:
        """The hashes of blocks that become full when the first `num_tokens` tokens are computed."""
        if not self._prefix_caching:
            return []
        full = num_tokens // self.block_size
        return [sequence.hash_at(index, self.block_size) for index in range(sequence.num_sealed, full)]

    def seal(self, sequence: Sequence) -> None:
        """Publish the blocks that are full by now."""
        for block_hash in self.completed_hashes(sequence, sequence.num_computed):
            self.pool.seal(sequence.blocks[sequence.num_sealed], block_hash)
            sequence.num_sealed += 1

    def release(self, sequence: Sequence) -> None:
        """All blocks back; what was computed is forgotten, but may still be hit by its hashes."""
        self.pool.free(reversed(sequence.blocks))
        sequence.blocks = []
        sequence.num_sealed = 0
        sequence.num_computed = 0
