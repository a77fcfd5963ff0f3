"""QoServe (arXiv 2503.22562, first called Niyama) and its parts, as its ablation adds them to earliest deadline first.

*Dynamic chunking*: a step takes as much prefill as is predicted to end before the first deadline of a running request
that is still on time; the paper errs towards smaller chunks, here by a tenth. *Eager demotion*: a request that is
predicted to miss its deadline is demoted, and continues when nothing else needs prefill. Importance is the class's
rank: instead of an important request that would be late, a less important one is demoted. *Hybrid priority*: arrival +
target + α · tokens left to compute (for a completion target, including the predicted output), which is earliest
deadline first at α = 0 and shortest job first at large α; the paper's sweep chose 8 ms per token for fixed rates.
Started prefill is delayed for another request only while a step's delay does not make it late.

The paper estimates the output length by the mean plus two standard deviations of the application's outputs; here it is
the corresponding quantile of a normal distribution, of the tenant's outputs. Otherwise the policy ignores tenants.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from moiety_engine.scheduling.policies.baseline_policies import OrderedPolicy, deadline_s
from moiety_engine.scheduling.policies.policy_interface import BatchView, PolicyContext, StepBudget
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.scheduling.step_time.step_time_model import StepShape
from moiety_engine.sequence import Sequence, SequenceState
from moiety_wire.trace_events import EventKind, Reason

_SLACK_USED = 0.9
_ALPHA_S = 0.008  # per token
_LONG_ANSWER = 0.977  # quantile
_SEEN_STEPS = 0.05  # weight of the newest step in the mean time of a step


class QoserveChunking(OrderedPolicy):
    """Earliest deadline first with dynamic chunking."""

    sizes_chunks = True

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context, deadline_s)

    def step_budget(self, view: BatchView, now_s: float) -> StepBudget | None:
        return StepBudget(_SLACK_USED * view.slack_s, floor_tokens=0)


class QoserveDemotion(QoserveChunking):
    """Earliest deadline first with dynamic chunking and eager demotion."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._of_rank: dict[int, EntryHeap] = {}
        self._demoted = EntryHeap()
        self._late: set[Sequence] = set()  # demoted requests that have not ended
        self._spared: set[Sequence] = set()  # those instead of which another request was demoted
        self._step_s = 0.0  # running mean

    # ── prefill queue ──

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._num_queued += sequence.enter_queue()
        self._enqueue(sequence, now_s)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = self._choose(now_s) or _first(self._demoted)
        if sequence is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        heap = self._demoted if sequence in self._late else self._of_rank.setdefault(sequence.service.rank, EntryHeap())
        heap.push(self.key(sequence, now_s), sequence)

    def _choose(self, now_s: float) -> Sequence | None:
        """Return the first request that is not demoted.

        Requests that will be late, or substitutes, are demoted before.
        """
        while True:
            firsts = [first for heap in self._of_rank.values() if (first := heap.first()) is not None]
            if not firsts:
                return None
            chosen = min(firsts, key=lambda first: first[:2])[3]
            if not self._will_be_late(chosen, now_s):
                return chosen
            least = max((first[3] for first in firsts), key=lambda s: s.service.rank)
            if least.service.rank <= chosen.service.rank:
                self._demote(chosen, now_s)
                continue
            if chosen not in self._spared:  # at most one substitute per request
                self._spared.add(chosen)
                self._demote(least, now_s)
            return chosen

    def _demote(self, sequence: Sequence, now_s: float) -> None:
        self._late.add(sequence)
        sequence.timeline.note(int(now_s * 1e9), EventKind.DEMOTED, Reason.SLO_UNATTAINABLE)
        self.context.tally.of(sequence.service.name).demoted += 1
        sequence.entry += 2  # its entry in the other heap is void
        self._enqueue(sequence, now_s)

    # ── predictions ──

    def arrived(self, sequence: Sequence, now_s: float) -> None:
        lengths, most = self.context.lengths, sequence.request.submit.max_tokens
        sequence.predicted_output = lengths.high(sequence.request.tenant, _LONG_ANSWER, at_most=most)

    def ended(self, sequence: Sequence, now_s: float) -> None:
        self._late.discard(sequence)
        self._spared.discard(sequence)

    def stepped(self, seconds: float, shape: StepShape, now_s: float) -> None:
        self._step_s += _SEEN_STEPS * (seconds - self._step_s)

    def _will_be_late(self, sequence: Sequence, now_s: float) -> bool:
        return now_s > self._latest_start_s(sequence)

    def _latest_start_s(self, sequence: Sequence) -> float:
        """Return the latest time to continue prefill for the deadline to be met; infinite for decoding requests."""
        if sequence.num_output:
            return math.inf
        model, full = self.context.step_time, self.context.max_batch_tokens
        a_step_s = model.predict_s(StepShape().with_prefill(full, sequence.kv.num_computed))
        need_s = sequence.num_uncomputed / full * a_step_s
        if sequence.service.ttft_s is None:
            need_s += sequence.predicted_output * self._step_s
        return deadline_s(sequence) - need_s

    # ── decisions ──

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []

        def giving_way(s: Sequence) -> tuple[bool, bool, float, int]:
            return s in self._late, s.num_output == 0, self.key(s, now_s), s.request.order

        return sorted(running, key=giving_way, reverse=True)


class Qoserve(QoserveDemotion):
    """QoServe with all parts: dynamic chunking, eager demotion and hybrid priority."""

    def __init__(self, context: PolicyContext) -> None:
        super().__init__(context)
        self._begun = EntryHeap()  # started prefill, by the time up to which it can be delayed

    def key(self, sequence: Sequence, now_s: float) -> float:
        tokens: float = sequence.num_uncomputed
        if sequence.service.ttft_s is None:
            tokens += max(0.0, sequence.predicted_output - sequence.num_output)
        return deadline_s(sequence) + _ALPHA_S * tokens

    def _enqueue(self, sequence: Sequence, now_s: float) -> None:
        super()._enqueue(sequence, now_s)
        if sequence.state is SequenceState.RUNNING and not sequence.num_output and sequence not in self._late:
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
