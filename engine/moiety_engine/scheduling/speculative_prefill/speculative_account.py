"""Account of speculatively prefilled tokens: each is used once, wasted once, or still open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SpeculativePrefillAccount:
    """Account in tokens, kept by block hashes."""

    def __init__(self, block_size: int, horizon_s: float) -> None:
        self._block_size = block_size
        self._horizon_s = horizon_s
        self._open: OrderedDict[bytes, float] = OrderedDict()  # time of computation
        self.computed_total = self.used_total = self.wasted_total = 0

    @property
    def open_tokens(self) -> int:
        """Tokens that are neither used nor wasted yet."""
        return len(self._open) * self._block_size

    def computed(self, hashes: Iterable[bytes], now_s: float) -> None:
        """Record computed blocks. A block that was computed before has been evicted unused and counts as wasted."""
        for block_hash in hashes:
            if self._open.pop(block_hash, None) is not None:
                self.wasted_total += self._block_size
            self._open[block_hash] = now_s
            self.computed_total += self._block_size

    def used(self, hashes: Iterable[bytes]) -> int:
        """Record the cached blocks that a request starts with.

        Return how many of their tokens were prefilled speculatively and not used before.
        """
        if not self._open:
            return 0
        tokens = sum(self._block_size for block_hash in hashes if self._open.pop(block_hash, None) is not None)
        self.used_total += tokens
        return tokens

    def lapse(self, now_s: float) -> None:
        """Count blocks that were not used within the horizon as wasted."""
        while self._open:
            computed_s = next(iter(self._open.values()))
            if now_s - computed_s < self._horizon_s:
                return
            self._open.popitem(last=False)
            self.wasted_total += self._block_size

    def forget(self) -> None:
        """Count all open blocks as wasted: the cache's contents are lost."""
        self.wasted_total += self.open_tokens
        self._open.clear()
