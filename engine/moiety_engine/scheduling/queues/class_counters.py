"""Counters of scheduling decisions since the start, and of waiting and running requests, by service class."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from moiety_wire.engine_load import ClassLoad
from moiety_wire.trace_events import Reason


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

    def load(self, name: str, predicted_ttft_s: float, oldest_waiting_unix_s: float) -> ClassLoad:
        """Return the counters as a wire message."""
        return ClassLoad(
            name=name,
            num_waiting=self.num_waiting,
            num_running=self.num_running,
            predicted_ttft_s=predicted_ttft_s,
            admitted_total=self.admitted,
            rejected_total=dict(self.rejected),
            downgraded_total=self.downgraded,
            preempted_total=dict(self.preempted),
            demoted_total=self.demoted,
            boosted_total=self.boosted,
            recomputed_tokens_total=self.recomputed_tokens,
            oldest_waiting_unix_s=oldest_waiting_unix_s,
        )


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
            tally.load(name, predicted_ttft_s.get(name, 0.0), oldest_unix_s.get(name, 0.0))
            for name, tally in sorted(self._classes.items())
        ]
