"""Decodes of spot classes: only what idle capacity is left for.

A step in which a request of another class waits for prefill has no rows of spot classes. In any other step they get the
rows with which it stays within a part of the SLOs of the recent classes, and not much longer than it would be without
them; they take turns. Spot prompts get what their decodes leave of the same time.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.policies.moiety.slo_tracker import SloTracker
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.policies.policy_interface import BatchView, StepBudget
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel


class SpotDecodes:
    """Chooses the spot rows of a step. `num_open` is the number of spot requests that have not ended."""

    def __init__(self, tuning: Tuning, slo: SloTracker, step_time: StepTimeModel) -> None:
        self._tuning, self._slo, self._step_time = tuning, slo, step_time
        self.num_open = 0

    def select(self, decoding: list[Chunk], *, others_wait: bool) -> list[Chunk]:
        """Return the chunks that decode in the next step, in the given order."""
        spot = [chunk for chunk in decoding if chunk.sequence.service.spot]
        if not spot:
            return decoding
        others = [chunk for chunk in decoding if not chunk.sequence.service.spot]
        if others_wait:
            return others
        limit_s = self._limit_s(others)
        if limit_s == math.inf:
            return decoding
        spot.sort(key=lambda chunk: chunk.sequence.deadlines.last_token_s)
        num_others = len(others)
        contexts = list(accumulate((chunk.sequence.kv.num_computed for chunk in spot), initial=context_of(others)))

        def predict_s(count: int) -> float:
            return self._step_time.predict_s(StepShape(num_others + count, 0, contexts[count]))

        num_taken = bisect_right(range(len(contexts)), limit_s, key=predict_s) - 1
        taken = {chunk.sequence for chunk in spot[: max(num_taken, 0 if others else 1)]}
        return [chunk for chunk in decoding if not chunk.sequence.service.spot or chunk.sequence in taken]

    def budget(self, view: BatchView, seconds: float) -> StepBudget:
        """Return the budget for spot prompts in a step, within that of others.

        It is the limit of the step with all its spot rows, so decodes and prompts together stay within it.
        """
        floor_tokens = self._tuning.floor_tokens
        if all(s.service.spot for s in view.running):
            return StepBudget(seconds, floor_tokens)
        others = [chunk for chunk in view.decodes if not chunk.sequence.service.spot]
        return StepBudget(min(seconds, self._limit_s(others)), floor_tokens)

    def _limit_s(self, others: list[Chunk]) -> float:
        """Return the longest time of a step with spot rows, in which these chunks of other classes decode."""
        slo_s = min(self._tuning.decode_part * self._slo.tpot_s, self._tuning.tight_ttft_part * self._slo.ttft_s)
        if not others:
            return slo_s
        alone_s = self._step_time.predict_s(StepShape(len(others), 0, context_of(others)))
        return min(slo_s, self._tuning.spot_part * alone_s)


def context_of(chunks: list[Chunk]) -> int:
    """Return the number of tokens whose KV the chunks' sequences read."""
    return sum(chunk.sequence.kv.num_computed for chunk in chunks)
