"""Whether a class's promise was kept. Pure: seconds from the request's arrival, as the gateway saw what came.

A sequence keeps it if its first token came by the first token's deadline and its last one by its own, or, where the
class promises an end, the last one by that. A client that reads slowly holds its own answer up, which counts as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from moiety_wire.classes import ServiceClass


@dataclass(slots=True)
class SloProgress:
    """What has come of one sequence."""

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


def is_kept(service: ServiceClass, sequences: Sequence[SloProgress]) -> bool:
    """Of a request whose sequences have all come to their end."""
    return all(_kept(service, sequence) for sequence in sequences)


def is_broken(service: ServiceClass, sequences: Sequence[SloProgress], now_s: float) -> bool:
    """Whether the promise of a request that was left before its end had been broken by then."""
    return any(_broken(service, sequence, now_s) for sequence in sequences)


def _kept(service: ServiceClass, sequence: SloProgress) -> bool:
    first_s, last_s = sequence.first_s, sequence.last_s
    if first_s is None or last_s is None:
        return False
    first_due_s = _first_due_s(service, sequence)
    if first_due_s is not None:
        last_due_s = None if service.tpot_s is None else first_due_s + (sequence.num_tokens - 1) * service.tpot_s
        if first_s > first_due_s or (last_due_s is not None and last_s > last_due_s):
            return False
    return service.completion_s is None or last_s <= service.completion_s


def _broken(service: ServiceClass, sequence: SloProgress, now_s: float) -> bool:
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
