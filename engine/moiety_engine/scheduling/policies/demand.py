"""Whether all that is promised can be kept: the work that is due by some time, against what can be done until then.

The demand bound of deadline scheduling (Baruah, Mok, Rosier, "Preemptively scheduling hard-real-time sporadic tasks on
one processor", RTSS 1990), with what waits and the rates of late in place of periods: by a time T from now are due all
of a class that wait, if its promise is shorter than T, else a part of them as T is of it; and what is yet to come of it
and due by then.
"""

from __future__ import annotations

from moiety_engine.scheduling.admission import PromptInflow
from moiety_wire.classes import ServiceClass

_MEAN_S = 60.0  # time constant of the rates: of promises that are far off, and not of a burst
_SHORTEST_S = 60.0
_NEGLIGIBLE = 0.001  # of what is served
_AHEAD = 4.0  # times the longest promise, up to which one looks


class DeadlineDemand:
    """Of all classes of late. O(1) for a request; what was demoted is due no more."""

    def __init__(self) -> None:
        self._classes: dict[str, tuple[ServiceClass, PromptInflow]] = {}

    def came(self, service: ServiceClass, num_tokens: int, now_s: float) -> None:
        _, inflow = self._classes.get(service.name, (service, None))
        if inflow is None:
            inflow = PromptInflow(now_s, _MEAN_S)
        self._classes[service.name] = service, inflow
        inflow.came(num_tokens, now_s)

    def left(self, service: ServiceClass, num_tokens: int) -> None:
        """So many tokens wait no longer, or for nothing."""
        self._classes[service.name][1].pending_tokens -= num_tokens

    def overload(self, rank: int, served_per_s: float, now_s: float) -> float:
        """The most tokens of this rank and better ones that are due by any time, as a multiple of what is served until
        then."""
        self._fade(_NEGLIGIBLE * served_per_s, now_s)
        flows = [
            (max(_SHORTEST_S, service.ttft_s or service.completion_s or 0.0), inflow)
            for service, inflow in self._classes.values()
            if service.rank <= rank
        ]
        longest_s = max((within_s for within_s, _ in flows), default=_SHORTEST_S)
        times_s = [*(within_s for within_s, _ in flows), _AHEAD * longest_s]
        return max(_due(flows, until_s) / (served_per_s * until_s) for until_s in times_s)

    def _fade(self, negligible_per_s: float, now_s: float) -> None:
        """Let time pass over the rates, and forget classes of which nothing waits and hardly anything comes."""
        for _, inflow in self._classes.values():
            inflow.fade(now_s)
        self._classes = {
            name: (service, inflow)
            for name, (service, inflow) in self._classes.items()
            if inflow.pending_tokens or inflow.arriving_per_s > negligible_per_s
        }


def _due(flows: list[tuple[float, PromptInflow]], until_s: float) -> float:
    """Tokens that are due by then, of (promised within so long, flow)."""
    return sum(
        inflow.pending_tokens * min(1.0, until_s / within_s) + inflow.arriving_per_s * max(0.0, until_s - within_s)
        for within_s, inflow in flows
    )
