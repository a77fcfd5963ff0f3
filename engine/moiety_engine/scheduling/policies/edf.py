"""Earliest deadline first, with a fixed number of tokens a step: the baseline that QoServe (arXiv 2503.22562) calls
Sarathi-EDF.

Prefill goes to the earliest deadline, that of the first token or, for a class that promises an end, of the last one;
chunks of several prompts may interleave as deadlines have it. Known for breaking down at overload: what is late has the
earliest deadline, and makes all others late.
"""

from __future__ import annotations

from collections.abc import Iterable

from moiety_engine.scheduling.policy import Policy
from moiety_engine.sequence import Sequence


def deadline_s(sequence: Sequence) -> float:
    """When the first token is due, or, if the class promises no pace, the last."""
    return sequence.completion_deadline_s if sequence.service.ttft_s is None else sequence.first_deadline_s


class Edf(Policy):
    """By deadline, then by arrival; the latest deadline gives way."""

    name = "edf"

    def key(self, sequence: Sequence, now_s: float) -> float:
        return deadline_s(sequence)

    def victims(
        self, running: Iterable[Sequence], beneficiary: Sequence | None, now_s: float, *, takes_blocks: bool = True
    ) -> list[Sequence]:
        if beneficiary is not None:
            return []  # prefill is interleaved, decoding is not interrupted for it
        return sorted(running, key=lambda s: (self.key(s, now_s), s.order), reverse=True)
