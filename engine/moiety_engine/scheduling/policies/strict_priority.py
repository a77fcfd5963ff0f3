"""Strict priority: better classes always go first, whatever the effect on others.

This is `--scheduling-policy priority` of vLLM: the queue is ordered by priority, then by arrival; when blocks are
short, the queue waits for its head, and the running sequence that is last in this order is preempted so that others can
decode. No sequence is preempted for a waiting request. The wait of the last class is unbounded.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.scheduling.policies.policy import Policy
from moiety_engine.sequence import Sequence


class StrictPriority(Policy):
    """Policy ordered by rank, then by arrival; ignores tenants and deadlines."""

    name = "strict-priority"

    def key(self, sequence: Sequence, now_s: float) -> int:
        return sequence.service.rank

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []
        return sorted(running, key=lambda s: (s.service.rank, s.request.order), reverse=True)
