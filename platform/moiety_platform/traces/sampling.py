"""Which traces are kept, decided when the request has ended."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from hashlib import blake2b

import msgspec

_RANGE = 2**64


class SamplingDecision(StrEnum):
    """Why a trace is kept; the last two, why it is not."""

    FAILED = "failed"
    SLA_MISSED = "sla_missed"
    PREEMPTED = "preempted"
    FAILED_OVER = "failed_over"
    FIRST = "first"  # of its second
    RATE = "rate"
    UNSAMPLED = "unsampled"
    OVER_BUDGET = "over_budget"  # it was to be kept, and so were too many others within its second

    @property
    def is_kept(self) -> bool:
        return self not in (SamplingDecision.UNSAMPLED, SamplingDecision.OVER_BUDGET)


@dataclass(frozen=True, slots=True)
class SamplingTerms:
    """`rate` of the traces that nothing speaks for, of a class another where `rates` has it; before that the first ones
    of every second. At most `max_per_s` of all."""

    rate: float = 0.02
    rates: Mapping[str, float] = field(default_factory=dict)
    first_per_s: int = 1
    max_per_s: int = 100


class Ending(msgspec.Struct, frozen=True):
    """What of an ended request speaks for its trace. `salt` is known to gateways alone."""

    trace_id: str
    salt: bytes
    service_class: str
    has_failed: bool
    sla_attained: bool | None
    num_preemptions: int
    num_failovers: int


class Sampler:
    """Decides for one gateway, and counts its verdicts. One thread."""

    def __init__(self, terms: SamplingTerms) -> None:
        self.counts: Counter[SamplingDecision] = Counter()
        self.terms = terms  # may be set to others, for the requests that end from then on
        self._second = -1
        self._num_kept = 0  # within it
        self._num_first = 0

    def decide(self, ending: Ending, now_s: float) -> SamplingDecision:
        """By the monotonic clock."""
        if (second := math.floor(now_s)) != self._second:
            self._second, self._num_kept, self._num_first = second, 0, 0
        verdict = self._judge(ending)
        if verdict.is_kept:
            if self._num_kept >= self.terms.max_per_s:
                verdict = SamplingDecision.OVER_BUDGET
            else:
                self._num_kept += 1
                self._num_first += verdict is SamplingDecision.FIRST
        self.counts[verdict] += 1
        return verdict

    def _judge(self, ending: Ending) -> SamplingDecision:
        if (reason := _speaks_for(ending)) is not None:
            return reason
        if self._num_first < self.terms.first_per_s:
            return SamplingDecision.FIRST
        rate = self.terms.rates.get(ending.service_class, self.terms.rate)
        is_drawn = rate >= 1 or (rate > 0 and _lot(ending) < rate * _RANGE)
        return SamplingDecision.RATE if is_drawn else SamplingDecision.UNSAMPLED


def _speaks_for(ending: Ending) -> SamplingDecision | None:
    if ending.has_failed:
        return SamplingDecision.FAILED
    if ending.sla_attained is False:
        return SamplingDecision.SLA_MISSED
    if ending.num_preemptions:
        return SamplingDecision.PREEMPTED
    return SamplingDecision.FAILED_OVER if ending.num_failovers else None


def _lot(ending: Ending) -> int:
    """The same for all requests of one trace at every gateway, so that they are kept or dropped together; and, for the
    salt in it, nothing that whoever chooses a trace's id could aim at."""
    return int.from_bytes(blake2b(ending.trace_id.encode(), key=ending.salt[:64], digest_size=8).digest())
