"""Capacity of a padded all-to-all: how many rows a layer may send to each rank, from the rows of its last passes.

A pure calculation on host numbers that all ranks have, so that all come to the same result without a message.

R ranks.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

SMALL_BOUND = 64  # below it padding costs little, and each token has room at each rank
_DECAY = 0.95  # of the remembered share in a pass
_DEVIATIONS = 4  # room for chance: standard deviations of a binomial number of rows
_ROUND = 16  # rows


class RowCapacity:
    """History of one layer: the largest recent share of a rank's tokens that goes to each destination."""

    def __init__(self, num_ranks: int) -> None:
        self._share_R = [1.0] * num_ranks  # before the first pass: every token

    def of_step(self, bound: int) -> list[int]:
        """Return the capacity for each destination, at most `bound`, the most tokens that any rank dispatches."""
        if bound <= SMALL_BOUND:
            return [bound] * len(self._share_R)
        return [_capacity(share, bound) for share in self._share_R]

    def observe(self, needed_R: Sequence[int], bound: int) -> None:
        """Remember a pass: the most rows that any rank had for each destination, of at most `bound` tokens."""
        if bound > SMALL_BOUND:
            self._share_R = [
                max(needed / bound, _DECAY * share) for needed, share in zip(needed_R, self._share_R, strict=True)
            ]


def _capacity(share: float, bound: int) -> int:
    mean = share * bound
    rows = mean + _DEVIATIONS * math.sqrt(max(1.0, mean * (1 - share)))
    return min(bound, _ROUND * math.ceil(rows / _ROUND))
