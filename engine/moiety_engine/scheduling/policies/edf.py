"""Earliest deadline first with a fixed number of tokens per step.

This is the baseline that QoServe (arXiv 2503.22562) calls Sarathi-EDF.

Prefill goes to the earliest deadline: that of the first token or, for a class with a completion target, of the last
one. Chunks of several prompts may interleave by deadline. The policy is known to break down at overload: late requests
have the earliest deadlines, and make all others late.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.scheduling.policies.policy import Policy
from moiety_engine.sequence import Sequence


def deadline_s(sequence: Sequence) -> float:
    """Return the deadline of the first token, or of the last one if the class has no TTFT target."""
    return sequence.deadlines.completion_s if sequence.service.ttft_s is None else sequence.deadlines.first_s


class Edf(Policy):
    """Policy ordered by deadline, then by arrival; the latest deadline is preempted first."""

    name = "edf"

    def key(self, sequence: Sequence, now_s: float) -> float:
        return deadline_s(sequence)

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []  # prefill is interleaved; decoding is not interrupted for it
        return sorted(running, key=lambda s: (self.key(s, now_s), s.request.order), reverse=True)
