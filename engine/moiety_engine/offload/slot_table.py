"""Which experts of a layer are in which of its slots, and who makes room for another. Numbers only: it moves nothing.

Slots are a layer's own. Layers are visited in turn, so that among slots for all of them what was used least recently
is the layer that comes next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.config import ExpertEviction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

KEPT_A_VISIT = 0.8  # of a frequency: half of it after 3 visits of the layer; benchmarks/offload.py compares


class ExpertSlotTable:
    """One layer's."""

    def __init__(self, num_experts: int, num_slots: int, eviction: ExpertEviction) -> None:
        self.eviction = eviction
        self.slot_E: NDArray[np.int32] = np.full(num_experts, -1, dtype=np.int32)
        self.expert_S: NDArray[np.int32] = np.full(num_slots, -1, dtype=np.int32)
        self._worth_E: NDArray[np.float64] = np.zeros(num_experts)
        self._visits = 0

    def visited(self, expert_ids: NDArray[np.int64]) -> None:
        """The layer is computed with those experts."""
        self._visits += 1
        if self.eviction is ExpertEviction.LRU:
            self._worth_E[expert_ids] = self._visits
        else:
            self._worth_E *= KEPT_A_VISIT
            self._worth_E[expert_ids] += 1

    def victims(self, most: int, kept: Iterable[int]) -> list[int]:
        """Up to so many slots for others, free ones first, then those whose experts are worth least; not those of the
        experts that are `kept`."""
        if most <= 0:
            return []
        worth_S = np.where(self.expert_S < 0, -1.0, self._worth_E[self.expert_S])
        keeping = self.slot_E[list(kept)]
        worth_S[keeping[keeping >= 0]] = np.inf
        order_S = np.argsort(worth_S, kind="stable")[:most]
        return [int(slot) for slot in order_S if worth_S[slot] < np.inf]

    def put(self, expert: int, slot: int) -> None:
        """The expert is in the slot; whoever was there is not any more."""
        before = self.expert_S[slot]
        if before >= 0:
            self.slot_E[before] = -1
        self.expert_S[slot], self.slot_E[expert] = expert, slot

    def drop(self, expert: int) -> None:
        """The expert's slot is free."""
        self.expert_S[self.slot_E[expert]] = -1
        self.slot_E[expert] = -1
