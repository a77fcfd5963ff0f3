"""Bucket of a rate limit, in which debt grows with use and decays steadily. Pure, in integers.

The generic cell rate algorithm (ITU-T I.371) as a leaky bucket: `debt` grows with what is taken, falls by `cap` per
minute, and may not exceed `cap`. So in any T minutes at most cap · (1 + T) is taken, and after an idle minute a full
minute's amount may be taken at once, as with OpenAI's limits. The unit of debt is 1/60,000, so that one millisecond
lowers it by exactly `cap`.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCALE = 60_000  # milliseconds per minute


@dataclass(frozen=True, slots=True)
class Bucket:
    """State of a rate at a point in time, by one clock."""

    cap: int  # per minute
    debt: int = 0
    at_ms: int = 0

    def at(self, now_ms: int) -> Bucket:
        """Return the bucket at a later time; a clock that is behind changes nothing.

        Debt from a higher cap counts as at most one minute's amount.
        """
        passed_ms = max(0, now_ms - self.at_ms)
        debt = min(self.debt, self.cap * _SCALE)
        return Bucket(self.cap, max(0, debt - passed_ms * self.cap), max(now_ms, self.at_ms))

    @property
    def remaining(self) -> int:
        """Amount that may be taken now."""
        return max(0, self.cap * _SCALE - self.debt) // _SCALE

    def take(self, amount: int) -> Bucket:
        """Return the bucket after `amount` was taken; a negative amount gives back."""
        return Bucket(self.cap, max(0, self.debt + amount * _SCALE), self.at_ms)
