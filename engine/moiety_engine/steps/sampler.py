"""Which steps are looked at: a few a second, however many there are."""

from __future__ import annotations


class StepSampler:
    """When to look: at the first step after a pause, and then as often as is told."""

    def __init__(self, per_s: float) -> None:
        """0: never."""
        self._interval_ns = round(1e9 / per_s) if per_s else 0
        self._next_ns = 0 if per_s else 2**63

    def is_due(self, now_ns: int) -> bool:
        if now_ns < self._next_ns:
            return False
        self._next_ns = now_ns + self._interval_ns
        return True
