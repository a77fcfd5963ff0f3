"""QoServe (arXiv 2503.22562, first called Niyama), and its parts one by one, as its ablation adds them to earliest
deadline first.

*Dynamic chunking*: a step takes in as much prefill as is predicted to end before the first token that a running request
still owes in time; the paper errs towards smaller chunks, as here by a tenth. *Eager demotion*: a request that is
predicted to miss its deadline is set aside, and goes on when nothing else wants prefill. Importance is the class's
rank: for an important request that would be late, a less important one is set aside in its stead. *Hybrid priority*:
arrival + target + α · tokens left to compute (for a promised end, those predicted to be decoded too), which is earliest
deadline first at α = 0 and shortest work first at large α; 8 ms a token is what the paper's sweep chose for fixed
rates. Prefill that has begun is put off for another only while a step's delay does not make it late.

The paper estimates an answer's length by the mean and two standard deviations of the application's; here it is the
quantile at which these stand in a normal distribution, of the tenant's. It knows no tenants otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moiety_engine.scheduling.entry_heap import EntryHeap
from moiety_engine.scheduling.policies.edf import Edf, deadline_s
from moiety_engine.scheduling.policy import BatchView, PolicyContext, StepBudget
from moiety_engine.scheduling.step_time_model import StepShape
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.notes import EventKind, Reason

_SLACK_USED = 0.9
_ALPHA_S = 0.008  # a token
_LONG_ANSWER = 0.977  # quantile
_SPARED = 1  # a sequence's `bucket`: another has been set aside in its stead
_SEEN_STEPS = 0.05  # weight of the newest in the mean time of a step


class QoserveChunking(Edf):
    """Earliest deadline first with dynamic chunks."""

    name = "qoserve-chunking"
    sizes_chunks = True

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        return StepBudget(_SLACK_USED * view.slack_s, floor_tokens=0)


class QoserveDemotion(QoserveChunking):
    """With eager demotion as well."""

    name = "qoserve-demotion"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._of_rank: dict[int, EntryHeap] = {}
        self._demoted = EntryHeap()
        self._step_s = 0.0  # running mean

    # ── the queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._num_queued += sequence.enter_queue()
        self._enter(sequence, now_s)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = self._choose(now_s) or _first(self._demoted)
        if sequence is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def _enter(self, sequence: Sequence, now_s: float) -> None:
        heap = self._demoted if sequence.demoted else self._of_rank.setdefault(sequence.service.rank, EntryHeap())
        heap.push(self.key(sequence, now_s), sequence)

    def _choose(self, now_s: float) -> Sequence | None:
        """The first that is not set aside. On the way those are that will be late, or others in their stead."""
        while True:
            firsts = [first for heap in self._of_rank.values() if (first := heap.first()) is not None]
            if not firsts:
                return None
            chosen = min(firsts, key=lambda first: first[:2])[3]
            if not self._will_be_late(chosen, now_s):
                return chosen
            least = max((first[3] for first in firsts), key=lambda s: s.service.rank)
            if least.service.rank <= chosen.service.rank:
                self._relegate(chosen, now_s)
                continue
            if chosen.bucket != _SPARED:  # one in its stead, once
                chosen.bucket = _SPARED
                self._relegate(least, now_s)
            return chosen

    def _relegate(self, sequence: Sequence, now_s: float) -> None:
        sequence.demoted = True
        sequence.note(int(now_s * 1e9), EventKind.DEMOTED, Reason.BEYOND_REPAIR)
        self.context.tally.of(sequence.service.name).demoted += 1
        sequence.entry += 2  # its place in the other heap is void
        self._enter(sequence, now_s)

    # ── predictions ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        lengths, most = self.context.lengths, sequence.submit.max_tokens
        sequence.predicted_output = lengths.high(sequence.tenant, _LONG_ANSWER, at_most=most)

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        self._step_s += _SEEN_STEPS * (seconds - self._step_s)

    def _will_be_late(self, sequence: Sequence, now_s: float) -> bool:
        return now_s > self._latest_start_s(sequence)

    def _latest_start_s(self, sequence: Sequence) -> float:
        """When prefill must go on for the deadline to be met; never too late for what decodes already."""
        if sequence.num_output:
            return math.inf
        model, full = self.context.step_time, self.context.max_batch_tokens
        a_step_s = model.predict_s(StepShape().with_prefill(full, sequence.num_computed))
        need_s = sequence.num_uncomputed / full * a_step_s
        if sequence.service.ttft_s is None:
            need_s += sequence.predicted_output * self._step_s
        return deadline_s(sequence) - need_s

    # ── what to do ──

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []

        def giving_way(s: Sequence) -> tuple[bool, bool, float, int]:
            return s.demoted, s.num_output == 0, self.key(s, now_s), s.order

        return sorted(running, key=giving_way, reverse=True)


class Qoserve(QoserveDemotion):
    """All of it."""

    name = "qoserve"

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._begun = EntryHeap()  # prefill that has begun, by when it can be put off no longer

    def key(self, sequence: Sequence, now_s: float) -> float:
        tokens: float = sequence.num_uncomputed
        if sequence.service.ttft_s is None:
            tokens += max(0.0, sequence.predicted_output - sequence.num_output)
        return deadline_s(sequence) + _ALPHA_S * tokens

    def _enter(self, sequence: Sequence, now_s: float) -> None:
        super()._enter(sequence, now_s)
        if sequence.place is SequenceState.RUNNING and not sequence.num_output and not sequence.demoted:
            until_s = self._latest_start_s(sequence) - self._step_s
            self._begun.push(until_s, sequence)

    def _choose(self, now_s: float) -> Sequence | None:
        while (first := self._begun.first()) is not None and first[0] <= now_s:
            begun: Sequence = first[3]
            if not self._will_be_late(begun, now_s):
                return begun
            self._begun.pop()
        return super()._choose(now_s)


def _first(heap: EntryHeap) -> Sequence | None:
    first = heap.first()
    return None if first is None else first[3]
