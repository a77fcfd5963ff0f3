"""Cached experts of one MoE layer: a pass loads the missing experts while the cached ones are computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from moiety_engine.config import ExpertEviction
from moiety_engine.offload.load_shares import LoadShares
from moiety_engine.offload.prefetch import PrefetchAccuracy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from moiety_engine.offload.loaders import ExpertLoader, LoadTicket
    from moiety_engine.offload.slot_table import ExpertSlotTable

STREAMED = 4  # one in so many slots streams, one after another, the experts that do not fit beside the others


@dataclass(slots=True)
class ExpertCacheCounters:
    """Counters of the expert cache since the start.

    A pass over a layer requests each of its experts once, regardless of the number of tokens.
    """

    hits_total: int = 0  # experts that were cached or in flight when a pass requested them
    misses_total: int = 0
    prefetched_total: int = 0  # loads started before a pass requested the expert
    prefetch_hits_total: int = 0  # prefetched experts that the next pass requested
    loaded_bytes_total: int = 0
    shares: LoadShares = field(default_factory=LoadShares)  # of the step's tokens in the loaded bytes


class LayerExperts:
    """Owner of the cache state of one layer's experts. Used by the step's thread only; one pass at a time."""

    def __init__(
        self,
        layer: int,
        slot_table: ExpertSlotTable,
        mover: ExpertLoader,
        expert_bytes: int,
        traffic: ExpertCacheCounters,
    ) -> None:
        self._layer, self._slot_table, self._loader = layer, slot_table, mover
        self._expert_bytes, self._traffic = expert_bytes, traffic
        self._tickets: dict[int, LoadTicket] = {}  # of loads that have not been waited for, in request order
        self._accuracy_by_size = {
            True: PrefetchAccuracy(),
            False: PrefetchAccuracy(),
        }  # of passes with few tokens (True) and with many (False)
        self._accuracy = self._accuracy_by_size[True]
        self._prefilled_ahead: set[int] = set()  # experts that `expect` found missing
        self._fetched: set[int] = set()  # experts among them whose load was started
        self._wanted: list[int] = []  # experts of the pass
        self._missing: list[int] = []  # wanted experts without a slot so far
        self._chosen: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)
        self._predicted: NDArray[np.int32] = self._chosen  # choices that `expect` predicted

    @property
    def num_slots(self) -> int:
        return len(self._slot_table.expert_S)

    def fill(self) -> None:
        """Load experts until no slot is free; does nothing if the eviction policy keeps no experts."""
        if self._slot_table.eviction is ExpertEviction.ALL:
            return
        for expert, slot in enumerate(self._slot_table.victims(self.num_slots, ())):
            self._load_expert(expert, slot, urgent=True)
        self.settle()

    def settle(self) -> None:
        """Wait for all loads in flight."""
        self._drop_failed()
        for expert in list(self._tickets):
            self._arrive(expert)
        self._loader.used(self._layer)

    # ── a pass ──

    def begin(self, chosen_TK: NDArray[np.int32]) -> None:
        """Begin a pass over these experts, ignoring negative ids.

        Starts to load the missing experts, as far as slots are available beside those that the pass needs.
        """
        self._chosen = chosen_TK
        counts_E = np.bincount(chosen_TK[chosen_TK >= 0], minlength=len(self._slot_table.slot_E))
        wanted = np.flatnonzero(counts_E)
        self._slot_table.visited(wanted)
        self._wanted = wanted.tolist()
        self._drop_failed()
        self._take_arrived()
        self._record_predictions()
        self._missing = [expert for expert in self._wanted if not self._has(expert)]
        self._traffic.hits_total += len(self._wanted) - len(self._missing)
        self._traffic.misses_total += len(self._missing)
        self._load_missing(len(self._missing), self._wanted)

    def slots_if_there(self) -> Tensor | None:
        """Return the slots of the pass's experts, [T, K]; None if some are not loaded yet."""
        self._take_arrived()
        if self._missing or any(expert in self._tickets for expert in self._wanted):
            return None
        return self._slots_of(self._wanted)

    def stages(self) -> Iterator[Tensor]:
        """Yield the slots of the experts to compute next, [T, K], negative for all others, until all are computed.

        Cached experts come first, then loaded ones as they arrive. Experts that were computed may be evicted.
        """
        computed = [expert for expert in self._wanted if self._has(expert) and expert not in self._tickets]
        if computed:
            yield self._slots_of(computed)
        while coming := self._arriving(computed):
            now = coming[: -(-len(coming) // 2)] if self._missing else coming
            for expert in now:
                self._arrive(expert)
            yield self._slots_of(now)
            computed += now

    def end(self) -> None:
        """End the pass; its computation has been queued."""
        self._loader.used(self._layer)
        if self._slot_table.eviction is ExpertEviction.ALL:
            for expert in self._wanted:
                if self._has(expert):
                    self._slot_table.drop(expert)

    def expect(self, chosen_TK: NDArray[np.int32]) -> None:
        """Prefetch the experts that the layer's next pass is predicted to use.

        If predictions have been accurate enough, starts to load the missing experts, the most frequent first, in slots
        of experts that are not predicted.
        """
        counts_E = np.bincount(chosen_TK[chosen_TK >= 0], minlength=len(self._slot_table.slot_E))
        self._take_arrived()
        self._accuracy = self._accuracy_by_size[chosen_TK.size <= len(counts_E)]
        self._predicted = chosen_TK
        expected = np.flatnonzero(counts_E)
        missing = sorted((e for e in expected.tolist() if not self._has(e)), key=lambda expert: -counts_E[expert])
        self._prefilled_ahead = set(missing)
        if not self._accuracy.is_worthwhile:
            return
        slots = self._slot_table.victims(len(missing), itertools.chain(expected.tolist(), self._tickets))
        for expert, slot in zip(missing, slots, strict=False):
            self._load_expert(expert, slot, urgent=False)
            self._traffic.shares.add(chosen_TK, expert, self._expert_bytes)
            self._fetched.add(expert)
            self._traffic.prefetched_total += 1

    # ── internals ──

    def _has(self, expert: int) -> bool:
        return bool(self._slot_table.slot_E[expert] >= 0)

    def _load_expert(self, expert: int, slot: int, *, urgent: bool) -> None:
        self._slot_table.put(expert, slot)
        self._tickets[expert] = self._loader.load_expert(self._layer, expert, slot, urgent=urgent)
        self._traffic.loaded_bytes_total += self._expert_bytes

    def _load_missing(self, most: int, kept: Iterable[int]) -> None:
        """Start to load up to `most` of the experts left, evicting experts that are neither `kept` nor in flight."""
        slots = self._slot_table.victims(min(most, len(self._missing)), itertools.chain(kept, self._tickets))
        for slot in slots:
            expert = self._missing.pop(0)
            self._load_expert(expert, slot, urgent=True)
            self._traffic.shares.add(self._chosen, expert, self._expert_bytes)

    def _arriving(self, computed: list[int]) -> list[int]:
        """Return the pass's experts that are in flight after those in `computed` have been computed."""
        wanted = set(self._wanted)
        if self._missing:
            self._loader.used(self._layer)
            waiting = len(wanted.intersection(self._tickets))
            self._load_missing(max(1, self.num_slots // STREAMED) - waiting, wanted.difference(computed))
            if not wanted.intersection(self._tickets):  # every other slot awaits a prefetch in flight
                self.settle()
                return self._arriving(computed)
        return [expert for expert in self._tickets if expert in wanted]

    def _arrive(self, expert: int) -> None:
        """Wait for an expert's load. On OSError, frees its slot and raises."""
        try:
            self._tickets.pop(expert).wait()
        except OSError:
            self._slot_table.drop(expert)
            raise

    def _drop_failed(self) -> None:
        """Free the slots of failed loads, so that a pass that wants the experts loads them again."""
        for expert in [expert for expert, ticket in self._tickets.items() if ticket.has_failed()]:
            del self._tickets[expert]
            self._slot_table.drop(expert)

    def _take_arrived(self) -> None:
        for expert in [expert for expert, ticket in self._tickets.items() if ticket.is_done()]:
            self._arrive(expert)

    def _record_predictions(self) -> None:
        """Update the prediction accuracy, and cancel prefetches of unwanted experts that have not begun."""
        wanted = set(self._wanted)
        self._accuracy.record_predictions(len(self._prefilled_ahead & wanted), len(self._prefilled_ahead))
        self._traffic.prefetch_hits_total += len(self._fetched & wanted)
        for expert in self._fetched - wanted:
            ticket = self._tickets.get(expert)
            if ticket is not None and ticket.cancel():
                del self._tickets[expert]
                self._slot_table.drop(expert)
                self._traffic.loaded_bytes_total -= self._expert_bytes
                self._traffic.shares.add(self._predicted, expert, -self._expert_bytes)
        self._prefilled_ahead.clear()
        self._fetched.clear()

    def _slots_of(self, some: list[int]) -> Tensor:
        """Return the slots of those chosen experts that are in `some`, [T, K], negative for all others."""
        slot_E1 = np.full(len(self._slot_table.slot_E) + 1, -1, dtype=np.int32)  # the last entry is for expert -1
        slot_E1[some] = self._slot_table.slot_E[some]
        return torch.from_numpy(slot_E1[self._chosen])
