"""Counters of scheduling decisions since the start, and of waiting and running requests, by service class."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moiety_wire.figures import ClassLoad
from moiety_wire.notes import Reason


@dataclass(slots=True)
class ClassCounter:
    """Counters of one class."""

    num_waiting: int = 0
    num_running: int = 0
    admitted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    downgraded: int = 0
    preempted: Counter[str] = field(default_factory=Counter)
    demoted: int = 0
    boosted: int = 0
    recomputed_tokens: int = 0


class ClassCounters:
    """Counters by the name of the class in which a request is, or would have been, served."""

    def __init__(self) -> None:
        self._classes: dict[str, ClassCounter] = {}

    def of(self, name: str) -> ClassCounter:
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = ClassCounter()
        return found

    def rejected(self, name: str, reason: Reason) -> None:
        self.of(name).rejected[reason.value] += 1

    def preempted(self, name: str, reason: Reason) -> None:
        self.of(name).preempted[reason.value] += 1

    def loads(self, predicted_ttft_s: dict[str, float], oldest_unix_s: dict[str, float]) -> list[ClassLoad]:
        """Return the counters as wire messages, ordered by name."""
        return [
            ClassLoad(
                name=name,
                num_waiting=tally.num_waiting,
                num_running=tally.num_running,
                predicted_ttft_s=predicted_ttft_s.get(name, 0.0),
                admitted_total=tally.admitted,
                rejected_total=dict(tally.rejected),
                downgraded_total=tally.downgraded,
                preempted_total=dict(tally.preempted),
                demoted_total=tally.demoted,
                boosted_total=tally.boosted,
                recomputed_tokens_total=tally.recomputed_tokens,
                oldest_waiting_unix_s=oldest_unix_s.get(name, 0.0),
            )
            for name, tally in sorted(self._classes.items())
        ]
