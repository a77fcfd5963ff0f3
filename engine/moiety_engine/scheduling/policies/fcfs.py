"""First come, first served: what most engines do. Who needs blocks takes them from the youngest."""

from __future__ import annotations

from moiety_engine.scheduling.policy import Policy
from moiety_engine.sequence import Sequence


class Fcfs(Policy):
    """By arrival; a preempted sequence keeps its place; nobody overtakes a head that waits for blocks."""

    name = "fcfs"

    def key(self, sequence: Sequence, now_s: float) -> int:
        return sequence.order
