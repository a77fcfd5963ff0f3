"""Load of a model's experts and their rebalancing among the ranks, as the step loop updates them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moiety_engine.expert_meter import ExpertMeter
from moiety_wire.experts import ExpertBalance, ExpertLoad, ExpertLoadQuery

if TYPE_CHECKING:
    from moiety_engine.expert_profiler import ExpertProfiler
    from moiety_engine.moe.history import ExpertPace
    from moiety_engine.moe.load_watch import CountTransfers, ExpertLoadTracker
    from moiety_engine.runner.expert_scaling import ExpertScaling
    from moiety_engine.runner.rebalancing import Rebalancing


class ExpertMonitor:
    """Expert load and rebalancing; does nothing for a model without experts. Used by the step loop's thread only."""

    def __init__(
        self,
        watch: ExpertLoadTracker | None,
        rebalancing: Rebalancing | None,
        scaling: ExpertScaling,
        profiler: ExpertProfiler | None = None,
    ) -> None:
        self._watch = watch
        self.is_active = watch is not None
        self.rebalancing, self.scaling = rebalancing, scaling
        self.meter = ExpertMeter(profiler)

    @property
    def pace(self) -> ExpertPace | None:
        """Newest figures of the experts' load in a step; None without experts."""
        return None if self._watch is None else self._watch.pace

    def update(self, now_s: float, transfers: CountTransfers, *, worked: bool) -> None:
        """Count the load of the steps so far, and move experts if that is due. `worked` means that a step ran."""
        if self._watch is None:
            return
        self._watch.update(now_s, transfers)
        if self.rebalancing is not None:
            before = self.rebalancing.moved_bytes_total
            self.rebalancing.update(now_s, self._watch.take_picks(), worked=worked)
            self.meter.add_moves(self.rebalancing.moved_bytes_total - before)
        if self.scaling.is_under_way and self.scaling.update() and self.rebalancing is not None:
            self.rebalancing.restart(now_s)

    def prepare_sleep(self) -> None:
        """End what is under way in the background. Call it between steps, before weights are offloaded."""
        self.scaling.cancel("the engine went to sleep in the meantime")
        if self.rebalancing is not None:
            self.rebalancing.finish_move()

    def close(self) -> None:
        """End what is under way in the background, and what moves experts."""
        self.scaling.cancel("the engine ended in the meantime")
        if self.rebalancing is not None:
            self.rebalancing.close()

    def active_profile(self, num_running: int) -> bytes:
        """Return the packed profile of the experts that recent steps used; b"" if none are sampled or none run."""
        profiler = self.meter.profiler
        return b"" if profiler is None else profiler.pack_active(num_running)

    def load(self, ask: ExpertLoadQuery, now_s: float) -> ExpertLoad:
        """Return the load of the experts, a few seconds old at most."""
        if self._watch is None:
            return ExpertLoad(ask.query_id, int(now_s), int(now_s))
        load = self._watch.load(ask, now_s)
        return load if self.rebalancing is None else self.rebalancing.with_places(load)

    def take_balance(self, now_s: float) -> ExpertBalance | None:
        """Return the balance of expert load, a few times a minute; None if there is nothing new."""
        return None if self._watch is None else self._watch.take_balance(now_s)

    def finish(self, now_s: float, transfers: CountTransfers) -> None:
        """Count what the device still holds, before its memory is released."""
        if self._watch is not None:
            self._watch.finish(now_s, transfers)
