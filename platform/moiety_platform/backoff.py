"""How long to wait before another try. Pure but for the random numbers, which keep tries apart."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Backoff:
    """Twice as long each time, up to a bound."""

    first_s: float = 0.5
    max_s: float = 60.0

    def after(self, num_tries: int) -> float:
        """Seconds to wait after so many tries, counted from 0."""
        doubled = self.first_s * 2 ** min(num_tries, MAX_DOUBLINGS)
        return float(min(self.max_s, doubled)) * random.uniform(0.75, 1.25)
