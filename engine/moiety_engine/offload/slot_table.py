"""Slot table of one layer's cached experts, and the eviction policy. Handles numbers only and moves no data.

Every layer has its own slots: layers are visited in turn, so in slots shared by all layers the least recently used
experts would be those of the next layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from moiety_engine.config import ExpertEviction

if TYPE_CHECKING:
    from collections.abc import Iterable

    from numpy.typing import NDArray

KEPT_A_VISIT = 0.8  # decay of a frequency per visit: half after 3 visits; benchmarks/offload.py compares values


class ExpertSlotTable:
    """Slot table of one layer."""

    def __init__(self, num_experts: int, num_slots: int, eviction: ExpertEviction) -> None:
        self.eviction = eviction
        self.slot_E: NDArray[np.int32] = np.full(num_experts, -1, dtype=np.int32)
        self.expert_S: NDArray[np.int32] = np.full(num_slots, -1, dtype=np.int32)
        self._worth_E: NDArray[np.float64] = np.zeros(num_experts)
        self._visits = 0

    def visited(self, expert_ids: NDArray[np.int64]) -> None:
        """Record that the layer is computed with these experts."""
        self._visits += 1
        if self.eviction is ExpertEviction.LRU:
            self._worth_E[expert_ids] = self._visits
        else:
            self._worth_E *= KEPT_A_VISIT
            self._worth_E[expert_ids] += 1

    def victims(self, most: int, kept: Iterable[int]) -> list[int]:
        """Return up to `most` slots to load other experts into: free slots first, then those of the least used experts.

        Slots of the experts in `kept` are excluded.
        """
        if most <= 0:
            return []
        worth_S = np.where(self.expert_S < 0, -1.0, self._worth_E[self.expert_S])
        keeping = self.slot_E[list(kept)]
        worth_S[keeping[keeping >= 0]] = np.inf
        order_S = np.argsort(worth_S, kind="stable")[:most]
        return [int(slot) for slot in order_S if worth_S[slot] < np.inf]

    def put(self, expert: int, slot: int) -> None:
        """Assign the slot to the expert, replacing the expert that held it."""
        before = self.expert_S[slot]
        if before >= 0:
            self.slot_E[before] = -1
        self.expert_S[slot], self.slot_E[expert] = expert, slot

    def drop(self, expert: int) -> None:
        """Free the expert's slot."""
        self.expert_S[self.slot_E[expert]] = -1
        self.slot_E[expert] = -1
