"""Exponential backoff. Pure except for the random numbers, which spread the retries."""

from __future__ import annotations

import random
from dataclasses import dataclass

MAX_DOUBLINGS = 16


@dataclass(frozen=True, slots=True)
class Backoff:
    """Waiting time that doubles with each try, up to a bound."""

    first_s: float = 0.5
    max_s: float = 60.0

    def after(self, num_tries: int) -> float:
        """Return the seconds to wait after `num_tries` tries, counted from 0."""
        doubled = self.first_s * 2 ** min(num_tries, MAX_DOUBLINGS)
        return float(min(self.max_s, doubled)) * random.uniform(0.75, 1.25)
