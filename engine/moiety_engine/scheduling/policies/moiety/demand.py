"""Feasibility of all deadlines: the work that is due by some time against the work that can be done until then.

This is the demand bound of deadline scheduling (Baruah, Mok, Rosier, "Preemptively scheduling hard-real-time sporadic
tasks on one processor", RTSS 1990), with pending work and recent arrival rates in place of periods. By a time T from
now, all pending tokens of a class are due if its target is shorter than T, otherwise the fraction T / target; in
addition, the future arrivals of the class that are due by then.
"""

from __future__ import annotations

from moiety_engine.scheduling.admission.prompt_flow import PromptInflow
from moiety_wire.classes import ServiceClass

_MEAN_S = 60.0  # time constant of the rates: long, since far deadlines do not depend on a burst
_SHORTEST_S = 60.0
_NEGLIGIBLE = 0.001  # fraction of the service rate
_HORIZON_FACTOR = 4.0  # horizon, as a multiple of the longest target


class DeadlineDemand:
    """Demand of all classes seen recently. O(1) per request; demoted requests are not counted."""

    def __init__(self) -> None:
        self._classes: dict[str, tuple[ServiceClass, PromptInflow]] = {}

    def add_tokens(self, service: ServiceClass, num_tokens: int, now_s: float) -> None:
        _, inflow = self._classes.get(service.name, (service, None))
        if inflow is None:
            inflow = PromptInflow(now_s, _MEAN_S)
        self._classes[service.name] = service, inflow
        inflow.add_tokens(num_tokens, now_s)

    def remove_tokens(self, service: ServiceClass, num_tokens: int) -> None:
        """Record tokens that no longer wait or were demoted."""
        self._classes[service.name][1].pending_tokens -= num_tokens

    def overload(self, rank: int, served_per_s: float, now_s: float) -> float:
        """Return the peak demand of this rank and better ones, relative to the service.

        It is the largest ratio, over all times, of the tokens that are due by then to the tokens that are served until
        then.
        """
        self._decay(_NEGLIGIBLE * served_per_s, now_s)
        flows = [
            (max(_SHORTEST_S, service.ttft_s or service.completion_s or 0.0), inflow)
            for service, inflow in self._classes.values()
            if service.rank <= rank
        ]
        longest_s = max((within_s for within_s, _ in flows), default=_SHORTEST_S)
        times_s = [*(within_s for within_s, _ in flows), _HORIZON_FACTOR * longest_s]
        return max(_due(flows, until_s) / (served_per_s * until_s) for until_s in times_s)

    def _decay(self, negligible_per_s: float, now_s: float) -> None:
        """Decay the rates, and drop classes without pending tokens and with a negligible arrival rate."""
        for _, inflow in self._classes.values():
            inflow.decay(now_s)
        self._classes = {
            name: (service, inflow)
            for name, (service, inflow) in self._classes.items()
            if inflow.pending_tokens or inflow.arriving_per_s > negligible_per_s
        }


def _due(flows: list[tuple[float, PromptInflow]], until_s: float) -> float:
    """Return the tokens that are due by `until_s`. Each flow is (target in seconds, inflow)."""
    return sum(
        inflow.pending_tokens * min(1.0, until_s / within_s) + inflow.arriving_per_s * max(0.0, until_s - within_s)
        for within_s, inflow in flows
    )
