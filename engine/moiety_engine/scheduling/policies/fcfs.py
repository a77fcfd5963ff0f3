"""First come, first served, as in most engines. The youngest sequences are preempted for blocks."""

from __future__ import annotations

from moiety_engine.scheduling.policies.policy import Policy
from moiety_engine.sequence import Sequence


class Fcfs(Policy):
    """Policy ordered by arrival.

    A preempted sequence keeps its position. No request overtakes the head of the queue while it waits for blocks.
    """

    name = "fcfs"

    def key(self, sequence: Sequence, now_s: float) -> int:
        return sequence.request.order
