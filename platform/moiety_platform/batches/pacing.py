"""Pacing of one batch by the responses to its lines. Pure.

A limit that refuses a line would refuse the next ones as well: the batch pauses, and continues with as many concurrent
lines as were not refused. Every answer raises that number a little, so that the batch uses what the limit leaves and
rarely tries in vain. If no engine can take a line, the batch only pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

LINES_PER_ROUND = 0.5  # concurrent lines gained per round of answers


@dataclass(slots=True)
class BatchPacing:
    """Pacing of one batch at one worker.

    `places` is how many of its lines may run here concurrently, `most` the worker's own bound; times are of a monotonic
    clock.
    """

    most: int
    places: float
    paused_until_s: float = float("-inf")
    num_refusals: int = 0  # consecutive

    @classmethod
    def full(cls, most: int) -> BatchPacing:
        return cls(most, float(most))

    def may_begin(self, num_running: int, now_s: float) -> int:
        """Return how many more lines may begin now."""
        return 0 if now_s < self.paused_until_s else max(0, int(self.places) - num_running)

    def refused(self, *, by_limit: bool, num_running: int, wait_s: float, now_s: float) -> None:
        """Record that a line has to be retried later, while `num_running` others were running.

        If several began together, the first one determines the pause.
        """
        if by_limit:
            self.places = float(max(1, min(self.places, num_running)))
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + wait_s
            self.num_refusals += 1

    def answered(self, now_s: float) -> None:
        """Record that a line has ended."""
        self.places = min(float(self.most), self.places + LINES_PER_ROUND / self.places)
        if now_s >= self.paused_until_s:
            self.num_refusals = 0
