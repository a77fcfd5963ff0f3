"""Strict priority: the better class first, whatever it does to the others.

What `--scheduling-policy priority` of vLLM does: the queue is ordered by priority, then by arrival, the head is waited
for when blocks are short, and of the running sequences the worst in that order gives way so that others can decode.
Nobody gives way to a request that waits. There is no bound on how long the last class waits.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.scheduling.policy import Policy
from moiety_engine.sequence import Sequence


class StrictPriority(Policy):
    """By rank, then by arrival; it does not know tenants and deadlines."""

    name = "strict-priority"

    def key(self, sequence: Sequence, now_s: float) -> int:
        return sequence.service.rank

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []
        return sorted(running, key=lambda s: (s.service.rank, s.order), reverse=True)
