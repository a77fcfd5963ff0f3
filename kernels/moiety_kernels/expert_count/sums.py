"""Sums that the counts of experts add to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor


class ExpertSums(NamedTuple):
    """Sums that `count_picks` adds to; all are int64 and stay in place.

    `picks_SLE`: tokens by slot and expert. `active_L`: experts that a pass chose at all. `weighted_LE`: tokens times
    their weights. `bytes_P`: bytes of experts by part. `bits_PLW`: the experts of each part's last token, one bit each
    (bit e % 64 of word e // 64); overwritten, not added; None if nobody reads them.
    """

    picks_SLE: Tensor
    active_L: Tensor
    weighted_LE: Tensor
    bytes_P: Tensor
    bits_PLW: Tensor | None = None
