"""How fast one batch is gone at, by what its lines are told. Pure.

A limit that refuses a line would refuse the next ones as well: the batch pauses, and goes on with as many lines at a
time as were not refused. Every answer widens that a little, so that what the limit leaves is used and seldom tried in
vain. Where no engine can take a line it only pauses.
"""

from __future__ import annotations

from dataclasses import dataclass

GROWTH = 0.5  # places, for each place's answer


@dataclass(slots=True)
class BatchPacing:
    """Of one batch at one worker. `places` is how many of its lines may run here at a time, `most` the worker's own
    bound; times are of a monotonic clock."""

    most: int
    places: float
    paused_until_s: float = float("-inf")
    num_refusals: int = 0  # on end

    @classmethod
    def full(cls, most: int) -> BatchPacing:
        return cls(most, float(most))

    def may_begin(self, num_running: int, now_s: float) -> int:
        """How many more lines may begin now."""
        return 0 if now_s < self.paused_until_s else max(0, int(self.places) - num_running)

    def refused(self, *, by_limit: bool, num_running: int, wait_s: float, now_s: float) -> None:
        """A line was told to come back; `num_running` others were not. Of several that began together the first counts
        for the pause."""
        if by_limit:
            self.places = float(max(1, min(self.places, num_running)))
        if now_s >= self.paused_until_s:
            self.paused_until_s = now_s + wait_s
            self.num_refusals += 1

    def answered(self, now_s: float) -> None:
        """A line has come to its end."""
        self.places = min(float(self.most), self.places + GROWTH / self.places)
        if now_s >= self.paused_until_s:
            self.num_refusals = 0
