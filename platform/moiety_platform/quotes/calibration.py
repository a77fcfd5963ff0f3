"""Correction of predicted times by the times that quoted requests took.

Step costs leave out what happens between steps and beside the engine, such as other processes on its machine. So each
gateway process learns two factors for each model, of the time to the first token and of the time per token: means of
actual divided by predicted times, in which recent requests count more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moiety_platform.quotes.timing import Timing

MEMORY = 0.9  # weight of the previous mean at each request
MAX_FACTOR = 20.0


@dataclass(slots=True)
class _LogFactors:
    """Logarithms of both factors."""

    first: float = 0.0
    token: float = 0.0


class QuoteCalibration:
    """Factors of one gateway process, by served model. For one event loop."""

    def __init__(self) -> None:
        self._factors: dict[str, _LogFactors] = {}

    def corrected(self, model: str, computed: Timing) -> Timing:
        """Return the computed times with the model's factors."""
        factors = self._factors.get(model)
        if factors is None:
            return computed
        return Timing(computed.first_token_s * math.exp(factors.first), computed.token_s * math.exp(factors.token))

    def observe(self, model: str, computed: Timing, first_s: float | None, token_s: float | None) -> None:
        """Learn from one request: the times that were computed for it without factors, and its actual ones.

        `first_s` is None for a prompt with a cached prefix, `token_s` for an answer of one token.
        """
        factors = self._factors.setdefault(model, _LogFactors())
        if first_s is not None:
            factors.first = _mean(factors.first, first_s, computed.first_token_s)
        if token_s is not None:
            factors.token = _mean(factors.token, token_s, computed.token_s)


def _mean(before: float, actual_s: float, computed_s: float) -> float:
    """Return the mean of logarithms, in which a request that took ten times as long counts as one ten times as fast."""
    if actual_s <= 0 or computed_s <= 0:
        return before
    found = min(max(math.log(actual_s / computed_s), -math.log(MAX_FACTOR)), math.log(MAX_FACTOR))
    return MEMORY * before + (1 - MEMORY) * found
