"""Predicted waiting times, the basis of admission decisions.

A request waits for the prompts of better ranks, and for those of its own rank that the tenants' counters put before it.
Prompts are served at the rate that was measured while some had to wait, less the arrivals of better ranks. All figures
are running means; none requires a scan of the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel

_MEAN_S = 10.0  # time constant of the running means
_MIN_SERVED = 0.001  # smallest assumed rate, as a fraction of the best rate, when nothing is served


@dataclass(slots=True)
class PromptInflow:
    """Arrival rate of prompt tokens and number of pending prompt tokens."""

    seen_s: float
    mean_s: float = _MEAN_S
    pending_tokens: int = 0
    arriving_per_s: float = 0.0  # running mean, as of `seen_s`

    def add_tokens(self, num_tokens: int, now_s: float) -> None:
        self.decay(now_s)
        self.pending_tokens += num_tokens
        self.arriving_per_s += num_tokens / self.mean_s

    def decay(self, now_s: float) -> None:
        self.arriving_per_s *= math.exp(-max(0.0, now_s - self.seen_s) / self.mean_s)
        self.seen_s = now_s


class PromptFlow:
    """Prompt tokens that arrive, wait and are served, by rank."""

    def __init__(self, step_time: StepTimeModel, max_batch_tokens: int) -> None:
        self._step_time = step_time
        self._max_batch_tokens = max_batch_tokens
        self._ranks: dict[int, PromptInflow] = {}
        self._served_per_s: float | None = None

    def add_request(self, rank: int, num_tokens: int, now_s: float) -> None:
        """Record an admitted request with `num_tokens` prompt tokens to compute."""
        self._ranks.setdefault(rank, PromptInflow(now_s)).add_tokens(num_tokens, now_s)

    def remove_tokens(self, rank: int, num_tokens: int) -> None:
        """Record that the tokens no longer wait: their request has started or ended."""
        self._ranks[rank].pending_tokens -= num_tokens

    def record_backlogged_step(self, seconds: float, prefill_tokens: int) -> None:
        """Record a step, while other prompts waited, and its prompt tokens."""
        rate = prefill_tokens / seconds
        if self._served_per_s is None:
            self._served_per_s = self.best_per_s
        share = 1 - math.exp(-seconds / _MEAN_S)
        self._served_per_s += share * (rate - self._served_per_s)

    @property
    def served_per_s(self) -> float:
        """Prompt tokens per second that were recently served while some had to wait."""
        if self._served_per_s is None:
            return self.best_per_s
        return max(self._served_per_s, _MIN_SERVED * self.best_per_s)

    @property
    def best_per_s(self) -> float:
        """Prompt tokens per second of a full step without decodes."""
        full = StepShape().with_prefill(self._max_batch_tokens, 0)
        return self._max_batch_tokens / self._step_time.predict_s(full)

    def wait_s(self, rank: int, ahead_tokens: float) -> float:
        """Return the predicted waiting time of a request of this rank.

        `ahead_tokens` prompt tokens of its own rank are served before it, at most as many as are pending.
        """
        served = self.served_per_s
        better_pending, better_per_s = self._sum_better(rank)
        own_rank = self._ranks.get(rank)
        ahead = better_pending + min(own_rank.pending_tokens if own_rank else 0, ahead_tokens)
        if ahead <= 0:
            return 0.0
        return ahead / max(served - better_per_s, 0.05 * served)

    def _sum_better(self, rank: int) -> tuple[int, float]:
        pending, arriving = 0, 0.0
        for other, flow in self._ranks.items():
            if other < rank:
                pending += flow.pending_tokens
                arriving += flow.arriving_per_s
        return pending, arriving
