"""Choice of the requests that decode in a step, so that worse ranks do not slow the best rank down.

One step gives each of its requests one token, and takes longer the more requests it has. If a step with all of them
would take longer than the best rank's SLOs allow, requests of worse ranks take turns. The best rank is in every step.
Requests of worse ranks whose next token is due are in the step as well, up to a fixed part of the worse ranks per step,
which bounds how long each of them waits for a token.

With expert batching, the requests whose next token is not wanted within the next two steps are chosen by their experts
instead of their deadlines (`expert_batching`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from itertools import accumulate

from moiety_engine.scheduling.plan import Chunk
from moiety_engine.scheduling.policies.moiety.expert_batching import (
    MAX_PASSED_OVER,
    TenantTurns,
    choose_by_experts,
    union_of,
)
from moiety_engine.scheduling.policies.moiety.slo_tracker import SloTracker
from moiety_engine.scheduling.policies.moiety.tuning import Tuning
from moiety_engine.scheduling.step_time.step_time_model import StepShape, StepTimeModel


class DecodePacing:
    """Chooses the decodes of a step."""

    def __init__(
        self, tuning: Tuning, pace: SloTracker, step_time: StepTimeModel, *, batches_experts: bool = False
    ) -> None:
        self._tuning = tuning
        self.batches_experts = batches_experts
        self._turns = TenantTurns()
        self._slo = pace
        self._step_time = step_time
        self.limit_s = math.inf  # limit of the newest step if worse ranks are held to the best rank's pace
        self.leaves_floor = True  # whether prompts of worse ranks get their minimum of tokens in the newest step
        self._predicted: tuple[StepShape, float] | None = None  # newest step with all decodes, and its seconds
        self._num_turns = 0  # steps in which the floor of worse ranks takes turns

    def select(self, decoding: list[Chunk], num_context: int, now_s: float, *, best_waits: bool) -> list[Chunk]:
        """Return the chunks that decode in the next step, in the given order.

        `num_context` is the number of tokens of all chunks' contexts. `best_waits` means that prompts of the best rank
        wait for the step or are part of it. All chunks are returned if the step is predicted to be short enough, or if
        only the best rank decodes. Otherwise O(n log n) in the number of chunks.
        """
        pace, self.limit_s, self.leaves_floor, self._predicted = self._slo, math.inf, True, None
        if pace.best_tpot_s == math.inf and pace.best_ttft_s == math.inf:
            return decoding
        best_rank = pace.best_rank
        shape = StepShape(len(decoding), 0, num_context)
        step_s = self._step_time.predict_s(shape)
        self._predicted = shape, step_s
        if best_waits and step_s <= (limit_s := self._longest_decode_s(best_is_there=True)):
            self._take_turn_of_floor()
            self.limit_s = limit_s  # no deadline bounds the step
            return decoding
        best = [chunk for chunk in decoding if chunk.sequence.service.rank <= best_rank]
        limit_s = self._longest_decode_s(best_is_there=best_waits or bool(best))
        if best_waits or best:
            self._take_turn_of_floor()
        is_late = any(chunk.sequence.deadlines.next_due_s == math.inf for chunk in best)
        if best_waits or is_late:  # no deadline bounds the step
            self.limit_s = limit_s
        if len(best) == len(decoding) or step_s <= limit_s:
            return decoding
        worse = [chunk for chunk in decoding if chunk.sequence.service.rank > best_rank]
        worse.sort(key=self._wanted_at_s)
        num_due = bisect_right(worse, now_s, key=self._wanted_at_s) if best_waits or best else len(worse)
        num_taken = max(self._num_that_fit(best, worse, limit_s), min(num_due, self._least_of(len(worse))))
        if num_taken == len(worse):
            return decoding
        self.limit_s = limit_s
        if not best_waits and not best:
            self._take_turn_of_floor()
        if self.batches_experts:
            first = self._first_with_slack(worse, num_taken, now_s + 2 * limit_s)
            taken = {chunk.sequence for chunk in self._by_experts(best, worse, num_taken, first)}
        else:
            taken = {chunk.sequence for chunk in worse[:num_taken]}
        return [c for c in decoding if c.sequence.service.rank <= best_rank or c.sequence in taken]

    def predict_s(self, shape: StepShape) -> float:
        """Return the predicted seconds of a step; known if all chunks of the newest `select` are its only rows."""
        known = self._predicted
        return known[1] if known is not None and known[0] == shape else self._step_time.predict_s(shape)

    def _first_with_slack(self, worse: list[Chunk], num_taken: int, until_s: float) -> int:
        """Return the first of the sorted requests whose next token is wanted later; at most `num_taken`."""
        return min(num_taken, bisect_right(worse, until_s, key=self._wanted_at_s))

    def _by_experts(self, best: list[Chunk], worse: list[Chunk], num_taken: int, first: int) -> list[Chunk]:
        """Return `num_taken` of the worse ranks' requests: the first ones, then those that add few experts.

        The first `first` requests are taken whatever they use, and so is each that was passed over MAX_PASSED_OVER
        times in a row: it lost its turn, by its deadline, to others. A tenant that is behind gets the turns of its
        deadlines.
        """
        must, open_, turns = worse[:first], list[Chunk](), self._turns
        for place, chunk in enumerate(worse[first:], start=first):
            waited = chunk.sequence.experts.num_passed_over >= MAX_PASSED_OVER
            waited = waited or (place < num_taken and turns.is_behind(chunk.sequence.request.tenant))
            (must if waited and len(must) < num_taken else open_).append(chunk)
        used = union_of(chunk.sequence.experts.predicted for chunk in (*best, *must))
        predicted = [chunk.sequence.experts.predicted for chunk in open_]
        taken = must + [open_[place] for place in choose_by_experts(used, predicted, num_taken - len(must))]
        for chunk in worse[:num_taken]:
            chunk.sequence.experts.num_passed_over += 1
        for chunk in taken:
            chunk.sequence.experts.num_passed_over = 0
        turns.count_step([one.sequence.request.tenant for one in worse], [one.sequence.request.tenant for one in taken])
        return taken

    def _take_turn_of_floor(self) -> None:
        self._num_turns += 1
        self.leaves_floor = self._num_turns % self._tuning.steps_of_floor == 0

    def _longest_decode_s(self, *, best_is_there: bool) -> float:
        """Return how long a step may take.

        The limit is a part of the best rank's TPOT target while any of it is in the step, else a part of its TTFT
        target, since a request that arrives meanwhile waits for the step to end.
        """
        to_first_token_s = self._tuning.tight_ttft_part * self._slo.best_ttft_s
        if not best_is_there:
            return to_first_token_s
        return min(self._tuning.decode_part * self._slo.best_tpot_s, to_first_token_s)

    def _num_that_fit(self, best: list[Chunk], worse: list[Chunk], limit_s: float) -> int:
        num_best, best_context = len(best), sum([chunk.sequence.kv.num_computed for chunk in best])
        contexts = list(accumulate((chunk.sequence.kv.num_computed for chunk in worse), initial=best_context))

        def predict_s(count: int) -> float:
            return self._step_time.predict_s(StepShape(num_best + count, 0, contexts[count]))

        return max(0, bisect_right(range(len(contexts)), limit_s, key=predict_s) - 1)

    def _least_of(self, num_worse: int) -> int:
        return math.ceil(self._tuning.least_decode_part * num_worse)

    def _wanted_at_s(self, chunk: Chunk) -> float:
        """Return when the request's next token is due; without a deadline, a fixed time after its newest token."""
        sequence = chunk.sequence
        return min(sequence.deadlines.next_due_s, sequence.deadlines.last_token_s + self._tuning.no_slo_token_s)
