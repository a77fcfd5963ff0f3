"""Predicted waiting time at an external engine, from its queue and the rate at which requests end there.

An external engine makes no prediction itself. The prediction is for an empty prompt, as with Moiety's own engines. The
counts by class are this gateway's own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from moiety_wire.classes import ServiceClass
from moiety_wire.engine_load import ClassLoad

WINDOW_S = 30.0

Waiting = tuple[ServiceClass, bool]  # a request of this gateway: its class, and whether its first token has arrived


class EndedRequests:
    """Samples of the number of ended requests at the server in the last WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, at_s: float, num_ended: int) -> None:
        """Add a sample. `num_ended` is a total. A lower total means that the server was restarted."""
        if self._samples and num_ended < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((at_s, num_ended))
        while len(self._samples) > 2 and self._samples[1][0] <= at_s - WINDOW_S:
            self._samples.popleft()

    @property
    def seconds_each(self) -> float:
        """Mean seconds between two ended requests. Without any, the length of the window is the lower bound."""
        if len(self._samples) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._samples[0], self._samples[-1]
        return (last_s - first_s) / max(1, last - first)


def class_loads(
    inflight: Iterable[Waiting],
    admitted: Mapping[ServiceClass, int],
    num_waiting: int,
    seconds_each: float,
    *,
    by_priority: bool,
) -> list[ClassLoad]:
    """Return the load of each class in `admitted`, which counts this gateway's requests.

    With `by_priority` only requests of the same or a better rank are ahead in the queue. Their share of the queue is
    estimated by their share of this gateway's own waiting requests.
    """
    waiting, running = Counter[str](), Counter[str]()
    ranks: Counter[int] = Counter()
    for service, has_started in inflight:
        if has_started:
            running[service.name] += 1
        else:
            waiting[service.name] += 1
            ranks[service.rank] += 1
    loads = {}
    for service, num_admitted in admitted.items():
        share = 1.0
        if by_priority and ranks:
            share = sum(count for rank, count in ranks.items() if rank <= service.rank) / ranks.total()
        loads[service.name] = ClassLoad(
            name=service.name,
            num_waiting=waiting[service.name],
            num_running=running[service.name],
            predicted_ttft_s=num_waiting * share * seconds_each,
            admitted_total=num_admitted,
            rejected_total={},
            downgraded_total=0,
            preempted_total={},
            demoted_total=0,
            boosted_total=0,
            recomputed_tokens_total=0,
        )
    return list(loads.values())
