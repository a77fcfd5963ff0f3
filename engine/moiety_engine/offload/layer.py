"""A mixture layer whose experts are cached: what a pass needs is brought, and what is there is computed meanwhile."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from moiety_engine.config import ExpertEviction
from moiety_engine.offload.prefetch import PrefetchAccuracy

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from numpy.typing import NDArray
    from torch import Tensor

    from moiety_engine.offload.loaders import ExpertLoader, LoadTicket
    from moiety_engine.offload.slot_table import ExpertSlotTable

STREAMED = 4  # of the slots, one in so many takes in turn what does not fit beside the others


@dataclass(slots=True)
class Traffic:
    """What the cache has done since the start. A pass over a layer asks for each of its experts once, however many
    tokens go there."""

    hits_total: int = 0  # experts that were there, or on their way, when a pass asked for them
    misses_total: int = 0
    prefetched_total: int = 0  # begun before a pass asked for them …
    prefetch_hits_total: int = 0  # … of which a pass then asked for so many
    loaded_bytes_total: int = 0


class LayerExperts:
    """Owns which experts of one layer are where. Used by the step's thread only; one pass at a time."""

    def __init__(
        self, layer: int, slot_table: ExpertSlotTable, mover: ExpertLoader, expert_bytes: int, traffic: Traffic
    ) -> None:
        self._layer, self._slot_table, self._mover = layer, slot_table, mover
        self._expert_bytes, self._traffic = expert_bytes, traffic
        self._tickets: dict[
            int, LoadTicket
        ] = {}  # of experts that nobody has waited for, in the order they were asked for
        self._accuracy_by_size = {
            True: PrefetchAccuracy(),
            False: PrefetchAccuracy(),
        }  # of passes of few tokens, and of many
        self._judging = self._accuracy_by_size[True]
        self._prefilled_ahead: set[int] = set()  # by `expect`, and missing then
        self._fetched: set[int] = set()  # of these
        self._wanted: list[int] = []
        self._left: list[int] = []  # of those, what there was no slot for yet
        self._chosen: NDArray[np.int32] = np.empty((0, 0), dtype=np.int32)

    @property
    def num_slots(self) -> int:
        return len(self._slot_table.expert_S)

    def fill(self) -> None:
        """Bring experts until no slot is free, unless none are kept."""
        if self._slot_table.eviction is ExpertEviction.ALL:
            return
        for expert, slot in enumerate(self._slot_table.victims(self.num_slots, ())):
            self._bring(expert, slot, urgent=True)
        self.settle()

    def settle(self) -> None:
        """Wait for all that is on its way."""
        self._drop_failed()
        for expert in list(self._tickets):
            self._arrive(expert)
        self._mover.used(self._layer)

    # ── a pass ──

    def begin(self, chosen_TK: NDArray[np.int32]) -> None:
        """A pass will compute these experts, negative ones aside. What is missing is on its way from now on, as far as
        there is room beside what the pass needs."""
        self._chosen = chosen_TK
        counts_E = np.bincount(chosen_TK[chosen_TK >= 0], minlength=len(self._slot_table.slot_E))
        wanted = np.flatnonzero(counts_E)
        self._slot_table.visited(wanted)
        self._wanted = wanted.tolist()
        self._drop_failed()
        self._take_arrived()
        self._judge()
        self._left = [expert for expert in self._wanted if not self._has(expert)]
        self._traffic.hits_total += len(self._wanted) - len(self._left)
        self._traffic.misses_total += len(self._left)
        self._bring_left(len(self._left), self._wanted)

    def slots_if_there(self) -> Tensor | None:
        """Where the experts of the pass are, [T, K]; None where some of them are not there yet."""
        self._take_arrived()
        if self._left or any(expert in self._tickets for expert in self._wanted):
            return None
        return self._slots_of(self._wanted)

    def stages(self) -> Iterator[Tensor]:
        """Where those are that can be computed, [T, K], and negative for others, until all had their turn: first what
        is there, then what has come. What was computed may make room."""
        computed = [expert for expert in self._wanted if self._has(expert) and expert not in self._tickets]
        if computed:
            yield self._slots_of(computed)
        while coming := self._coming(computed):
            now = coming[: -(-len(coming) // 2)] if self._left else coming
            for expert in now:
                self._arrive(expert)
            yield self._slots_of(now)
            computed += now

    def end(self) -> None:
        """What the pass computes has been queued."""
        self._mover.used(self._layer)
        if self._slot_table.eviction is ExpertEviction.ALL:
            for expert in self._wanted:
                if self._has(expert):
                    self._slot_table.drop(expert)

    def expect(self, chosen_TK: NDArray[np.int32]) -> None:
        """The layer's next pass may compute these: where such guesses have been right often enough, bring what is
        missing, the most frequent first, in place of what it will not compute."""
        counts_E = np.bincount(chosen_TK[chosen_TK >= 0], minlength=len(self._slot_table.slot_E))
        self._take_arrived()
        self._judging = self._accuracy_by_size[chosen_TK.size <= len(counts_E)]
        expected = np.flatnonzero(counts_E)
        missing = sorted((e for e in expected.tolist() if not self._has(e)), key=lambda expert: -counts_E[expert])
        self._prefilled_ahead = set(missing)
        if not self._judging.pays:
            return
        slots = self._slot_table.victims(len(missing), itertools.chain(expected.tolist(), self._tickets))
        for expert, slot in zip(missing, slots, strict=False):
            self._bring(expert, slot, urgent=False)
            self._fetched.add(expert)
            self._traffic.prefetched_total += 1

    # ── within it ──

    def _has(self, expert: int) -> bool:
        return bool(self._slot_table.slot_E[expert] >= 0)

    def _bring(self, expert: int, slot: int, *, urgent: bool) -> None:
        self._slot_table.put(expert, slot)
        self._tickets[expert] = self._mover.bring(self._layer, expert, slot, urgent=urgent)
        self._traffic.loaded_bytes_total += self._expert_bytes

    def _bring_left(self, most: int, kept: Iterable[int]) -> None:
        """Up to so many of what is left, in place of experts that are neither `kept` nor on their way."""
        slots = self._slot_table.victims(min(most, len(self._left)), itertools.chain(kept, self._tickets))
        for slot in slots:
            self._bring(self._left.pop(0), slot, urgent=True)

    def _coming(self, computed: list[int]) -> list[int]:
        """Of the pass, what is on its way now that those have been computed."""
        wanted = set(self._wanted)
        if self._left:
            self._mover.used(self._layer)
            waiting = len(wanted.intersection(self._tickets))
            self._bring_left(max(1, self.num_slots // STREAMED) - waiting, wanted.difference(computed))
            if not wanted.intersection(self._tickets):  # whatever has room was foreseen, and is still coming
                self.settle()
                return self._coming(computed)
        return [expert for expert in self._tickets if expert in wanted]

    def _arrive(self, expert: int) -> None:
        """Raises OSError, and then the expert is not there."""
        try:
            self._tickets.pop(expert).wait()
        except OSError:
            self._slot_table.drop(expert)
            raise

    def _drop_failed(self) -> None:
        """What could not be read before anybody asked for it is asked for again if it is wanted."""
        for expert in [expert for expert, ticket in self._tickets.items() if ticket.has_failed()]:
            del self._tickets[expert]
            self._slot_table.drop(expert)

    def _take_arrived(self) -> None:
        for expert in [expert for expert, ticket in self._tickets.items() if ticket.is_done()]:
            self._arrive(expert)

    def _judge(self) -> None:
        """Learn what guesses are worth; what was fetched and is not wanted need not come if nobody has begun it."""
        wanted = set(self._wanted)
        self._judging.judged(len(self._prefilled_ahead & wanted), len(self._prefilled_ahead))
        self._traffic.prefetch_hits_total += len(self._fetched & wanted)
        for expert in self._fetched - wanted:
            ticket = self._tickets.get(expert)
            if ticket is not None and ticket.cancel():
                del self._tickets[expert]
                self._slot_table.drop(expert)
                self._traffic.loaded_bytes_total -= self._expert_bytes
        self._prefilled_ahead.clear()
        self._fetched.clear()

    def _slots_of(self, some: list[int]) -> Tensor:
        """Where those of the chosen experts are, negative for all others."""
        slot_E1 = np.full(len(self._slot_table.slot_E) + 1, -1, dtype=np.int32)  # the last is that of expert -1
        slot_E1[some] = self._slot_table.slot_E[some]
        return torch.from_numpy(slot_E1[self._chosen])
