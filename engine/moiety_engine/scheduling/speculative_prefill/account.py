"""What was computed before it was asked for, and what became of it: each such token is used once, wasted once, or still
open."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable


class SpeculativePrefillAccount:
    """Of blocks, by their hashes; in tokens."""

    def __init__(self, block_size: int, horizon_s: float) -> None:
        self._block_size = block_size
        self._horizon_s = horizon_s
        self._open: OrderedDict[bytes, float] = OrderedDict()  # when it was computed
        self.computed_total = self.used_total = self.wasted_total = 0

    @property
    def open_tokens(self) -> int:
        """Neither used nor wasted yet."""
        return len(self._open) * self._block_size

    def computed(self, hashes: Iterable[bytes], now_s: float) -> None:
        """Of these blocks. What was computed before and is again has been evicted meanwhile, and was for nothing."""
        for block_hash in hashes:
            if self._open.pop(block_hash, None) is not None:
                self.wasted_total += self._block_size
            self._open[block_hash] = now_s
            self.computed_total += self._block_size

    def used(self, hashes: Iterable[bytes]) -> int:
        """A request begins with these blocks, from the cache: how many tokens of them had been foreseen, and were not
        used before."""
        if not self._open:
            return 0
        tokens = sum(self._block_size for block_hash in hashes if self._open.pop(block_hash, None) is not None)
        self.used_total += tokens
        return tokens

    def lapse(self, now_s: float) -> None:
        """What has not been used by now is not going to be."""
        while self._open:
            computed_s = next(iter(self._open.values()))
            if now_s - computed_s < self._horizon_s:
                return
            self._open.popitem(last=False)
            self.wasted_total += self._block_size

    def forget(self) -> None:
        """The cache's contents are lost."""
        self.wasted_total += self.open_tokens
        self._open.clear()
