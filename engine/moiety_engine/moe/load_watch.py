"""Expert load tracking of the step loop: counted in every step, downloaded from the device every few seconds.

The download is queued behind the last launched step and read once it has arrived, so that no step waits for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
from torch import Tensor

from moiety_engine.moe.history import INTERVAL_S, ExpertPace, LoadHistory
from moiety_engine.moe.load import Counts, ExpertCounter
from moiety_engine.moe.shape import ExpertShape
from moiety_engine.moe.tenants import TenantSlots
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery

TAKE_S = 2.0
REPORT_INTERVAL_S = 10.0


class DeviceEvent(Protocol):
    """A point in the device's work."""

    @property
    def is_passed(self) -> bool: ...

    def wait(self) -> None: ...


class CountTransfers(Protocol):
    """Asynchronous copies from the device to host memory."""

    def download(self, tensor: Tensor) -> Tensor: ...

    def mark(self) -> DeviceEvent: ...


@dataclass(frozen=True, slots=True)
class PlacementLoad:
    """Load that experts are placed by: picks, and picks times the weights of the service ranks, both [L, E]."""

    picks_LE: np.ndarray
    weighted_LE: np.ndarray

    def plus(self, other: PlacementLoad) -> PlacementLoad:
        """Return the sum."""
        return PlacementLoad(self.picks_LE + other.picks_LE, self.weighted_LE + other.weighted_LE)


@dataclass(frozen=True, slots=True)
class _Coming:
    counts: Counts
    names: dict[int, str]
    steps: int
    arrival: DeviceEvent


class ExpertLoadTracker:
    """Owner of the load history and of the schedule by which counts are downloaded and tenant slots reassigned.

    Used by the step loop's thread only.
    """

    def __init__(self, shape: ExpertShape, counter: ExpertCounter, slots: TenantSlots, now_s: float) -> None:
        self.history = LoadHistory(shape, now_s)
        self._counter, self._slots = counter, slots
        counter.take(lambda tensor: tensor)  # discard earlier counts
        self._coming: _Coming | None = None
        self._due_s = self._report_at_s = 0.0
        self._minute = int(now_s) // INTERVAL_S
        self._is_news = False
        self.pace: ExpertPace | None = None  # of the counts read last
        self._picks: PlacementLoad | None = None  # of all tenants, since the last take_picks

    def update(self, now_s: float, transfers: CountTransfers) -> None:
        """Read counts that have arrived, and start the next download when it is due. Call it between steps."""
        if self._coming is not None and self._coming.arrival.is_passed:
            self._read(now_s)
        if now_s >= self._due_s and self._coming is None:
            self._due_s = now_s + TAKE_S
            self._take(now_s, transfers)

    def finish(self, now_s: float, transfers: CountTransfers) -> None:
        """Move all counts so far into the history; waits for the device."""
        if self._coming is not None:
            self._read(now_s)
        self._take(now_s, transfers)
        if self._coming is not None:
            self._read(now_s)

    def load(self, ask: ExpertLoadQuery, now_s: float) -> ExpertLoad:
        return self.history.load(ask.query_id, ask.minutes, ask.tenant_id, now_s)

    def take_picks(self) -> PlacementLoad | None:
        """Return the picks of all tenants read since the last call; None if none were read."""
        picks, self._picks = self._picks, None
        return picks

    def take_balance(self, now_s: float) -> ExpertBalance | None:
        """Return the expert balance, if there are new counts and a report is due; None otherwise."""
        if not self._is_news or now_s < self._report_at_s:
            return None
        self._is_news, self._report_at_s = False, now_s + REPORT_INTERVAL_S
        return self.history.balance(now_s)

    def _take(self, now_s: float, transfers: CountTransfers) -> None:
        steps = self._slots.take_steps()
        if steps:
            self._coming = _Coming(self._counter.take(transfers.download), self._slots.names(), steps, transfers.mark())
        minute = int(now_s) // INTERVAL_S
        if minute != self._minute:
            self._minute = minute
            self._slots.reassign()

    def _read(self, now_s: float) -> None:
        coming, self._coming = self._coming, None
        assert coming is not None
        coming.arrival.wait()
        picks_SLE = coming.counts.picks_SLE.numpy()
        picks_of = {name: picks_SLE[slot] for slot, name in coming.names.items() if picks_SLE[slot].any()}
        self._slots.weigh({name: int(picks_LE[0].sum()) for name, picks_LE in picks_of.items()})
        active_L = coming.counts.active_L.numpy()
        self.history.add(picks_of, active_L, coming.steps, now_s)
        if picks_of:
            picks_LE = np.sum(list(picks_of.values()), axis=0)
            self.pace = ExpertPace.of(picks_LE, active_L, coming.steps)
            load = PlacementLoad(picks_LE, coming.counts.weighted_LE.numpy())
            self._picks = load if self._picks is None else self._picks.plus(load)
        self.history.keep_only_tenants(self._slots.names().values())
        self._is_news = True
