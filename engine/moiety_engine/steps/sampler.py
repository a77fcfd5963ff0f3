"""Selection of steps to trace: a few per second, whatever the step rate."""

from __future__ import annotations


class StepSampler:
    """Sampler of steps: the first step after a pause, and then at most `per_s` per second."""

    def __init__(self, per_s: float) -> None:
        """Create a sampler. `per_s` of 0: no step is sampled."""
        self._interval_ns = round(1e9 / per_s) if per_s else 2**64
        self._last_ns = 0 if not per_s else -(2**64)

    def is_due(self, now_ns: int) -> bool:
        """Return whether to sample a step now. Uses the wall clock, which may be set back."""
        if 0 <= now_ns - self._last_ns < self._interval_ns:
            return False
        self._last_ns = now_ns
        return True
