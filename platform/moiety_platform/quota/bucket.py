"""A rate's bucket: what was taken of late weighs on it, and wears off steadily. Pure, in integers.

The generic cell rate algorithm (ITU-T I.371) as a leaky bucket: `debt` grows with what is taken, falls by `cap` a
minute, and may not exceed `cap`. So in any T minutes at most cap · (1 + T) is taken, and after a quiet minute all of
a minute's worth may be taken at once, which is how OpenAI's limits work. Debt is kept in units of 1/60,000, for then
a millisecond lowers it by exactly `cap`.
"""

from __future__ import annotations

from dataclasses import dataclass

_SCALE = 60_000  # milliseconds a minute


@dataclass(frozen=True, slots=True)
class Bucket:
    """The state of a rate at a moment, by one clock."""

    cap: int  # a minute
    debt: int = 0
    at_ms: int = 0

    def at(self, now_ms: int) -> Bucket:
        """The same at a later moment; a clock that is behind changes nothing. What was taken under a higher cap weighs
        a minute's worth at most."""
        passed_ms = max(0, now_ms - self.at_ms)
        debt = min(self.debt, self.cap * _SCALE)
        return Bucket(self.cap, max(0, debt - passed_ms * self.cap), max(now_ms, self.at_ms))

    @property
    def remaining(self) -> int:
        """How much may be taken now."""
        return max(0, self.cap * _SCALE - self.debt) // _SCALE

    def take(self, amount: int) -> Bucket:
        """After so much was taken; a negative amount gives back."""
        return Bucket(self.cap, max(0, self.debt + amount * _SCALE), self.at_ms)
