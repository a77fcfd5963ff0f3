"""Correction of predicted times, and of the margin of guarantees, by the times that quoted requests took.

Step costs leave out what happens between steps and beside the engine, such as other processes on its machine. So each
gateway process learns two factors for each model and class, of the time to the first token and of the time per token:
means of actual divided by predicted times, in which recent requests count more. It also learns the margin with which
nearly all recent guarantees would have been met.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field

from moiety_platform.quotes.timing import Timing

MEMORY = 0.9  # weight of the previous mean at each request
MAX_FACTOR = 20.0
MAX_MARGINS = 200  # recent requests of which a margin is learned
MIN_MARGINS = 20
MET_FRACTION = 0.98  # of the recent guarantees, with the learned margin


@dataclass(slots=True)
class _Learned:
    """Logarithms of both factors, and the least margins that the recent guarantees would have needed."""

    first: float = 0.0
    token: float = 0.0
    margins: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_MARGINS))


class QuoteCalibration:
    """Factors and margins of one gateway process, by served model and quoted class. For one event loop."""

    def __init__(self) -> None:
        self._learned: dict[tuple[str, str], _Learned] = {}

    def corrected(self, model: str, service_class: str, computed: Timing) -> Timing:
        """Return the computed times with the factors of the model and the class."""
        learned = self._learned.get((model, service_class))
        if learned is None:
            return computed
        return Timing(computed.first_token_s * math.exp(learned.first), computed.token_s * math.exp(learned.token))

    def margin(self, model: str, service_class: str, least: float) -> float:
        """Return the margin of a guarantee: `least`, or more if too many recent guarantees would have needed more."""
        learned = self._learned.get((model, service_class))
        if learned is None or len(learned.margins) < MIN_MARGINS:
            return least
        return max(least, sorted(learned.margins)[math.ceil(MET_FRACTION * len(learned.margins)) - 1])

    def observe(
        self, model: str, service_class: str, computed: Timing, first_s: float | None, token_s: float | None
    ) -> None:
        """Learn from one request: the times that were computed for it without factors, and its actual ones.

        `first_s` is None for a prompt with a cached prefix, `token_s` for an answer of one token.
        """
        learned = self._learned.setdefault((model, service_class), _Learned())
        if first_s is not None:
            learned.first = _mean(learned.first, first_s, computed.first_token_s)
        if token_s is not None:
            learned.token = _mean(learned.token, token_s, computed.token_s)

    def observe_margin(self, model: str, service_class: str, needed: float) -> None:
        """Learn from one request the least margin with which its guarantee would have been met."""
        self._learned.setdefault((model, service_class), _Learned()).margins.append(needed)


def _mean(before: float, actual_s: float, computed_s: float) -> float:
    """Return the mean of logarithms, in which a request that took ten times as long counts as one ten times as fast."""
    if actual_s <= 0 or computed_s <= 0:
        return before
    found = min(max(math.log(actual_s / computed_s), -math.log(MAX_FACTOR)), math.log(MAX_FACTOR))
    return MEMORY * before + (1 - MEMORY) * found
