"""A class's bounds against what a run shows: whether they were kept, how tight or how loose they can be."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import msgspec

from moiety_engine.simulator.metrics import spread, tpot_s
from moiety_engine.simulator.records import Record, Run
from moiety_wire.classes import ServiceClass

KEPT = 0.99  # of a class's requests: its promise counts as kept
_MARGIN = 1.25  # over the p99 that was measured
_LOOSENED = 1.5


@dataclass(frozen=True, slots=True)
class ClassBounds:
    """A class's promise as it is and as advised, with what a run with the advised one shows. p99 is None where the
    class had no request in it. A promised end is only ever loosened, never tightened."""

    name: str
    num_requests: int
    attainment: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    promised_ttft_s: float | None
    promised_tpot_s: float | None
    promised_completion_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    completion_s: float | None


def attainment(run: Run) -> dict[str, float]:
    """Of each class that had requests, the share that kept the promise; the rejected did not."""
    total = Counter(record.request.service_class for record in run.records)
    kept = Counter(record.request.service_class for record in run.records if record.attained)
    return {name: kept[name] / number for name, number in total.items()}


def loosen(service: ServiceClass, run: Run) -> ServiceClass:
    """Bounds beyond what the run shows, and beyond the present ones."""
    members = _members(service.name, run)

    def beyond(bound: float | None, measured: float | None) -> float | None:
        if bound is None:
            return None
        return _round_up(max(bound * _MARGIN, (measured or 0.0) * _LOOSENED))

    return msgspec.structs.replace(
        service,
        ttft_s=beyond(service.ttft_s, _ttft_beyond_allowance(service, members)),
        tpot_s=beyond(service.tpot_s, _tpot(members)),
        completion_s=beyond(service.completion_s, _e2e(members)),
    )


def tighten(service: ServiceClass, run: Run) -> ServiceClass:
    """Bounds with a margin over what the run shows, never looser than the present ones."""
    members = _members(service.name, run)

    def within(bound: float | None, measured: float | None) -> float | None:
        if bound is None or measured is None or measured <= 0:
            return bound
        return min(bound, _round_up(measured * _MARGIN))

    return msgspec.structs.replace(
        service,
        ttft_s=within(service.ttft_s, _ttft_beyond_allowance(service, members)),
        tpot_s=within(service.tpot_s, _tpot(members)),
    )


def measure_bounds(promised: ServiceClass, advised: ServiceClass, run: Run) -> ClassBounds:
    """What to tell of a class, from a run with the advised bounds."""
    members = _members(promised.name, run)
    return ClassBounds(
        name=promised.name,
        num_requests=len(members),
        attainment=attainment(run).get(promised.name, 1.0),
        ttft_p99_s=_p99([(record.first_ns - record.arrival_ns) / 1e9 for record in members if record.first_ns]),
        tpot_p99_s=_tpot(members),
        e2e_p99_s=_e2e(members),
        promised_ttft_s=promised.ttft_s,
        promised_tpot_s=promised.tpot_s,
        promised_completion_s=promised.completion_s,
        ttft_s=advised.ttft_s,
        tpot_s=advised.tpot_s,
        completion_s=advised.completion_s,
    )


def _members(name: str, run: Run) -> list[Record]:
    return [record for record in run.records if record.request.service_class == name]


def _p99(values: list[float]) -> float | None:
    return spread(values)["p99"]


def _tpot(members: list[Record]) -> float | None:
    return _p99([value for record in members if (value := tpot_s(record)) is not None])


def _e2e(members: list[Record]) -> float | None:
    return _p99([(record.last_ns - record.arrival_ns) / 1e9 for record in members if record.completed])


def _ttft_beyond_allowance(service: ServiceClass, members: list[Record]) -> float | None:
    """TTFT without what the class allows for the prompt's length, which is what `ttft_s` bounds."""
    return _p99(
        [
            (record.first_ns - record.arrival_ns) / 1e9
            - service.ttft_per_1k_s * (record.request.input_tokens - record.cached_tokens) / 1000
            for record in members
            if record.first_ns
        ]
    )


def _round_up(value: float) -> float:
    """To two significant digits, upwards."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit - 1e-9) * unit, 6)
