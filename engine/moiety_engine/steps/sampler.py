"""Which steps are looked at: a few a second, however many there are."""

from __future__ import annotations


class StepSampler:
    """When to look: at the first step after a pause, and then as often as is told."""

    def __init__(self, per_s: float) -> None:
        """0: never."""
        self._interval_ns = round(1e9 / per_s) if per_s else 2**64
        self._last_ns = 0 if not per_s else -(2**64)

    def is_due(self, now_ns: int) -> bool:
        """By the wall clock, which may be put back."""
        if 0 <= now_ns - self._last_ns < self._interval_ns:
            return False
        self._last_ns = now_ns
        return True
