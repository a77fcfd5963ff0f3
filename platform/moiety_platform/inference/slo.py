"""SLO attainment of a service class. Pure. Times are seconds from the request's arrival at the gateway.

A sequence attains its SLO if its first token arrives by the TTFT deadline and its last token by the TPOT deadline. If
the class has a completion deadline, the last token must arrive by that. A client that reads slowly delays its own
answer, which counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from moiety_wire.classes import ServiceClass


@dataclass(slots=True)
class SloProgress:
    """Progress of one sequence."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_tokens: int = 0
    first_s: float | None = None
    last_s: float | None = None

    def take(self, num_tokens: int, at_s: float) -> None:
        self.num_tokens += num_tokens
        self.last_s = at_s
        if self.first_s is None:
            self.first_s = at_s


def slo_attained(service: ServiceClass, sequences: Sequence[SloProgress]) -> bool:
    """Return whether a request attained its SLO. All its sequences have ended."""
    return all(map(partial(_attained, service), sequences))


def slo_missed(service: ServiceClass, sequences: Sequence[SloProgress], now_s: float) -> bool:
    """Return whether a request that was left before its end had already missed its SLO."""
    return any(_missed(service, sequence, now_s) for sequence in sequences)


def _attained(service: ServiceClass, sequence: SloProgress) -> bool:
    first_s, last_s = sequence.first_s, sequence.last_s
    if first_s is None or last_s is None:
        return False
    first_due_s = _first_due_s(service, sequence)
    if first_due_s is not None:
        last_due_s = None if service.tpot_s is None else first_due_s + (sequence.num_tokens - 1) * service.tpot_s
        if first_s > first_due_s or (last_due_s is not None and last_s > last_due_s):
            return False
    return service.completion_s is None or last_s <= service.completion_s


def _missed(service: ServiceClass, sequence: SloProgress, now_s: float) -> bool:
    first_due_s = _first_due_s(service, sequence)
    first_s = now_s if sequence.first_s is None else sequence.first_s
    if first_due_s is not None and first_s > first_due_s:
        return True
    return service.completion_s is not None and now_s > service.completion_s


def _first_due_s(service: ServiceClass, sequence: SloProgress) -> float | None:
    if service.ttft_s is None:
        return None
    num_uncached = sequence.num_prompt_tokens - sequence.num_cached_tokens
    return service.ttft_s + service.ttft_per_1k_s * num_uncached / 1000
