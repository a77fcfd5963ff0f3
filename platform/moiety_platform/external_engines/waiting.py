"""How long a request would wait at a server of others: from its queue and from how fast requests have ended there.

Such a server predicts nothing itself. What is told here is of an empty prompt, as with engines of ours, and the counts
by class are this gateway's own.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping

from moiety_wire.classes import ServiceClass
from moiety_wire.figures import ClassLoad

WINDOW_S = 30.0

Waiting = tuple[ServiceClass, bool]  # one of our requests: its class, and whether its first token has come


class Ends:
    """How many requests had ended at the server at which moment, for the last WINDOW_S."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def note(self, at_s: float, num_ended: int) -> None:
        """`num_ended` is a total; one that has fallen is of a server that was restarted."""
        if self._samples and num_ended < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((at_s, num_ended))
        while len(self._samples) > 2 and self._samples[1][0] <= at_s - WINDOW_S:
            self._samples.popleft()

    @property
    def seconds_each(self) -> float:
        """Mean time from one end to the next; where none has come, it is at least as long as was waited."""
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
    """Of the classes in `admitted`, which counts our requests. With `by_priority` only those of the same or a better
    rank are ahead: as large a part of the queue as of our own requests that wait."""
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
