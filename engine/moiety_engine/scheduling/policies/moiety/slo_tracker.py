"""SLOs of recently seen classes and the engine's speed: the figures that a step's decisions share."""

from __future__ import annotations

import math

from moiety_engine.scheduling.admission.prompt_flow import PromptFlow
from moiety_engine.scheduling.policies.moiety.demand import DeadlineDemand
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_wire.classes import ServiceClass

_REFRESH_S = 1.0


class SloTracker:
    """SLO and speed figures. Refreshed once a second; a new class is included at once."""

    def __init__(self, tuning: Tuning, flow: PromptFlow) -> None:
        self._tuning = tuning
        self._flow = flow
        self._seen: dict[str, tuple[float, ServiceClass]] = {}  # last arrival and class, by name
        self.refresh_at_s = 0.0
        self.tpot_s = math.inf  # shortest TPOT target of the recent classes
        self.ttft_s = math.inf
        self.best_rank = 0
        self.best_tpot_s = math.inf  # shortest TPOT target of the best rank's recent classes
        self.best_ttft_s = math.inf
        self.token_s = 0.0  # predicted seconds of a prompt token in a full step
        self.step_s = 0.0  # running mean
        self.blend = 0.0  # seconds that a deadline moves for each second of work
        self.by_work: dict[int, float] = {}  # the same, by rank with mixed targets and a long wait
        self.longest_step_s = self._longest_step()
        self.demand = DeadlineDemand()

    def _longest_step(self) -> float:
        """Return the longest step time that an arriving request can wait for."""
        if self.ttft_s == math.inf == self.tpot_s:
            return self._tuning.no_slo_step_s
        shortest_s, longest_s = self._tuning.step_range_s
        usual_s = min(longest_s, max(shortest_s, self._tuning.ttft_part * self.ttft_s))
        return min(usual_s, self._tuning.tight_ttft_part * self.best_ttft_s)

    @property
    def classes(self) -> list[ServiceClass]:
        return [service for _, service in self._seen.values()]

    def record_class(self, service: ServiceClass, now_s: float) -> None:
        """Record a request of this class."""
        self._seen[service.name] = (now_s, service)
        self._include(service)
        self.longest_step_s = self._longest_step()

    def record_step(self, seconds: float) -> None:
        self.step_s += 0.05 * (seconds - self.step_s)

    def refresh(self, now_s: float) -> None:
        """Drop classes that were not seen recently, and update the figures."""
        if now_s < self.refresh_at_s:
            return
        self.refresh_at_s = now_s + _REFRESH_S
        oldest_s = now_s - self._tuning.remembered_s
        self._seen = {name: seen for name, seen in self._seen.items() if seen[0] >= oldest_s}
        self.tpot_s = self.ttft_s = self.best_tpot_s = self.best_ttft_s = math.inf
        self.best_rank = min((service.rank for service in self.classes), default=0)
        for service in self.classes:
            self._include(service)
        self.longest_step_s = self._longest_step()
        self.token_s = 1 / self._flow.best_per_s
        waits_s = {service.rank: self._flow.wait_s(service.rank, math.inf) for service in self.classes}
        self.blend = self._tuning.blend * min(1.0, max(waits_s.values(), default=0.0) / self._tuning.loaded_s)
        paces = {service.rank for service in self.classes if service.ttft_s is not None}
        ends = {service.rank for service in self.classes if service.ttft_s is None}
        mixed = [rank for rank in paces & ends if waits_s[rank] >= self._tuning.loaded_s]
        self.by_work = {rank: self._blend_of_mixed(rank, now_s) for rank in mixed}

    def _include(self, service: ServiceClass) -> None:
        self.tpot_s = min(self.tpot_s, service.tpot_s or math.inf)
        self.ttft_s = min(self.ttft_s, service.ttft_s or math.inf)
        if service.rank < self.best_rank:
            self.best_rank, self.best_tpot_s, self.best_ttft_s = service.rank, math.inf, math.inf
        if service.rank == self.best_rank:
            self.best_tpot_s = min(self.best_tpot_s, service.tpot_s or math.inf)
            self.best_ttft_s = min(self.best_ttft_s, service.ttft_s or math.inf)

    def _blend_of_mixed(self, rank: int, now_s: float) -> float:
        excess = self.demand.overload(rank, self._flow.served_per_s, now_s) - 1
        (from_excess, to_excess), (least, most) = self._tuning.mixed_excess, self._tuning.mixed_blend
        part = (excess - from_excess) / (to_excess - from_excess)
        return least + (most - least) * max(0.0, min(1.0, part))
