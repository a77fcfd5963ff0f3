"""Tail sampling: the decision which traces are kept, made at the end of the request."""

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
    """Reasons for keeping a trace; the last two are reasons for dropping it."""

    FAILED = "failed"
    SLO_MISSED = "slo_missed"
    PREEMPTED = "preempted"
    FAILED_OVER = "failed_over"
    FIRST = "first"  # first of its second
    RATE = "rate"
    UNSAMPLED = "unsampled"
    OVER_BUDGET = "over_budget"  # it was to be kept, but too many others of its second were

    @property
    def is_kept(self) -> bool:
        return self not in (SamplingDecision.UNSAMPLED, SamplingDecision.OVER_BUDGET)


@dataclass(frozen=True, slots=True)
class SamplingTerms:
    """Rates of sampling.

    `rate` is the share of traces without a special reason, with other values by class in `rates`; in addition the first
    ones of every second are kept. At most `max_per_s` in total.
    """

    rate: float = 0.02
    rates: Mapping[str, float] = field(default_factory=dict)
    first_per_s: int = 1
    max_per_s: int = 100


class EndedRequest(msgspec.Struct, frozen=True):
    """Properties of an ended request that decide on its trace. Only gateways know `salt`."""

    trace_id: str
    salt: bytes
    service_class: str
    has_failed: bool
    slo_attained: bool | None
    num_preemptions: int
    num_failovers: int


class Sampler:
    """Sampler of one gateway, which counts its decisions. For one thread."""

    def __init__(self, terms: SamplingTerms) -> None:
        self.counts: Counter[SamplingDecision] = Counter()
        self.terms = terms  # can be changed, for requests that end from then on
        self._second = -1
        self._num_kept = 0  # within this second
        self._num_first = 0

    def decide(self, ending: EndedRequest, now_s: float) -> SamplingDecision:
        """Return the decision. `now_s` is of the monotonic clock."""
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

    def _judge(self, ending: EndedRequest) -> SamplingDecision:
        if (reason := _reason_to_keep(ending)) is not None:
            return reason
        if self._num_first < self.terms.first_per_s:
            return SamplingDecision.FIRST
        rate = self.terms.rates.get(ending.service_class, self.terms.rate)
        is_drawn = rate >= 1 or (rate > 0 and _random_value(ending) < rate * _RANGE)
        return SamplingDecision.RATE if is_drawn else SamplingDecision.UNSAMPLED


def _reason_to_keep(ending: EndedRequest) -> SamplingDecision | None:
    if ending.has_failed:
        return SamplingDecision.FAILED
    if ending.slo_attained is False:
        return SamplingDecision.SLO_MISSED
    if ending.num_preemptions:
        return SamplingDecision.PREEMPTED
    return SamplingDecision.FAILED_OVER if ending.num_failovers else None


def _random_value(ending: EndedRequest) -> int:
    """Return a pseudo-random number of the trace.

    It is the same for all requests of one trace at every gateway, so that they are kept or dropped together; because of
    the salt, a client cannot choose a trace id that is always kept.
    """
    return int.from_bytes(blake2b(ending.trace_id.encode(), key=ending.salt[:64], digest_size=8).digest())
