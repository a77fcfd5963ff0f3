"""Whether a request is let in: how long it would wait, by what is ahead of it and how fast that goes.

Ahead of a request are the prompts of better ranks, and those of its own that the tenants' counters put before it. They
go at the rate at which prompts were served while some had to wait, less what better ranks are taking.
All figures are running means; none needs a look at the queue.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from moiety_engine.scheduling.steptime import StepShape, StepTimeModel

_MEAN_S = 10.0  # time constant of the running means


@dataclass(slots=True)
class _RankFlow:
    pending_tokens: int = 0
    arriving_per_s: float = 0.0  # tokens let in, running mean
    seen_s: float = 0.0


class PromptFlow:
    """Prompt tokens that wait, come and go, by rank."""

    def __init__(self, step_time: StepTimeModel, max_batch_tokens: int) -> None:
        self._step_time = step_time
        self._max_batch_tokens = max_batch_tokens
        self._ranks: dict[int, _RankFlow] = {}
        self._served_per_s: float | None = None

    def came(self, rank: int, num_tokens: int, now_s: float) -> None:
        """A request was let in with so many tokens to compute."""
        flow = self._ranks.setdefault(rank, _RankFlow(seen_s=now_s))
        flow.pending_tokens += num_tokens
        self._fade(flow, now_s)
        flow.arriving_per_s += num_tokens / _MEAN_S

    def left(self, rank: int, num_tokens: int) -> None:
        """They wait no longer: the request has started, or is gone."""
        self._ranks[rank].pending_tokens -= num_tokens

    def stepped(self, seconds: float, prefill_tokens: int, *, backlogged: bool) -> None:
        """A step served so many prompt tokens; others waited, or not."""
        if not backlogged:
            return
        rate = prefill_tokens / seconds
        if self._served_per_s is None:
            self._served_per_s = self.best_per_s
        share = 1 - math.exp(-seconds / _MEAN_S)
        self._served_per_s += share * (rate - self._served_per_s)

    @property
    def best_per_s(self) -> float:
        """Prompt tokens a second with nothing else to do."""
        full = StepShape().with_prefill(self._max_batch_tokens, 0)
        return self._max_batch_tokens / self._step_time.predict_s(full)

    def wait_s(self, rank: int, ahead_tokens: float) -> float:
        """How long a request of this rank waits that has so many prompt tokens of its own rank before it (no more than
        there are)."""
        served = self._served_per_s if self._served_per_s is not None else self.best_per_s
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

    def _fade(self, flow: _RankFlow, now_s: float) -> None:
        flow.arriving_per_s *= math.exp(-max(0.0, now_s - flow.seen_s) / _MEAN_S)
        flow.seen_s = now_s
