"""Policies that only order the queue; each one is a function of the sequence.

*First come, first served* (`arrival_order`) is what most engines do. A preempted sequence keeps its position.

*Strict priority* (`rank_order`) is `--scheduling-policy priority` of vLLM: better classes always go first, whatever the
effect on others. The wait of the last class is unbounded.

*Earliest deadline first* (`deadline_s`) is the baseline that QoServe (arXiv 2503.22562) calls Sarathi-EDF. Chunks of
several prompts may interleave by deadline. It is known to break down at overload: late requests have the earliest
deadlines, and make all others late.

None of them preempts a sequence for a waiting request, and no request overtakes the head of the queue while it waits
for blocks. When blocks are short, the last running sequence in the order is preempted so that others can decode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from moiety_engine.scheduling.policies.policy_interface import Policy, PolicyContext
from moiety_engine.scheduling.queues.entry_heap import EntryHeap
from moiety_engine.sequence import Sequence


def arrival_order(sequence: Sequence) -> int:
    """Return the place in the order of arrival."""
    return sequence.request.order


def rank_order(sequence: Sequence) -> int:
    """Return the rank of the service class."""
    return sequence.service.rank


def deadline_s(sequence: Sequence) -> float:
    """Return the deadline of the first token, or of the last one if the class has no TTFT target."""
    return sequence.deadlines.completion_s if sequence.service.ttft_s is None else sequence.deadlines.first_s


class OrderedPolicy(Policy):
    """Queue in a fixed order, ties by arrival; the order's last running sequence is preempted first."""

    def __init__(self, context: PolicyContext, order: Callable[[Sequence], float] = arrival_order) -> None:
        super().__init__(context)
        self._sort_key = order
        self._heap = EntryHeap()
        self._num_queued = 0

    def key(self, sequence: Sequence, now_s: float) -> float:
        """Return the sort key in the queue: smaller first, ties by arrival. Computed once, on entering."""
        return self._sort_key(sequence)

    def push(self, sequence: Sequence, now_s: float) -> None:
        self._num_queued += sequence.enter_queue()
        self._heap.push(self.key(sequence, now_s), sequence)

    def pop(self, now_s: float) -> Sequence | None:
        sequence = self._heap.pop()
        if sequence is not None:
            self._num_queued -= sequence.leave_queue()
        return sequence

    def discard(self, sequence: Sequence) -> None:
        self._num_queued -= sequence.leave_queue()

    @property
    def num_queued(self) -> int:
        return self._num_queued

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []
        return sorted(running, key=lambda s: (self.key(s, now_s), s.request.order), reverse=True)
