"""Latency bounds of a class compared with a run: attainment, and tighter or looser bounds."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import msgspec

from moiety_engine.simulator.metrics import spread, tpot_s
from moiety_engine.simulator.records import Record, Run
from moiety_wire.classes import ServiceClass

REQUIRED_ATTAINMENT = 0.99  # share of a class's requests that must attain the SLO
_MARGIN = 1.25  # factor over the measured p99
_LOOSENED = 1.5


@dataclass(frozen=True, slots=True)
class ClassBounds:
    """A class's SLO as configured and as advised, with the figures of a run under the advised one.

    A p99 is None where the class had no request in the run. A completion target is only loosened, never tightened.
    """

    name: str
    num_requests: int
    attainment: float
    ttft_p99_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    configured_ttft_s: float | None
    configured_tpot_s: float | None
    configured_completion_s: float | None
    ttft_s: float | None
    tpot_s: float | None
    completion_s: float | None


def attainment(run: Run) -> dict[str, float]:
    """Return the share of requests that attained the SLO, by class; rejected requests count as missed."""
    total = Counter(record.request.service_class for record in run.records)
    kept = Counter(record.request.service_class for record in run.records if record.attained)
    return {name: kept[name] / number for name, number in total.items()}


def loosen(service: ServiceClass, run: Run) -> ServiceClass:
    """Return the class with bounds looser than the run's figures and than the present bounds."""
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
    """Return the class with bounds a margin over the run's figures, never looser than the present bounds."""
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


def measure_bounds(configured: ServiceClass, advised: ServiceClass, run: Run) -> ClassBounds:
    """Return the figures of a class from a run with the advised bounds."""
    members = _members(configured.name, run)
    return ClassBounds(
        name=configured.name,
        num_requests=len(members),
        attainment=attainment(run).get(configured.name, 1.0),
        ttft_p99_s=_p99([(record.first_ns - record.arrival_ns) / 1e9 for record in members if record.first_ns]),
        tpot_p99_s=_tpot(members),
        e2e_p99_s=_e2e(members),
        configured_ttft_s=configured.ttft_s,
        configured_tpot_s=configured.tpot_s,
        configured_completion_s=configured.completion_s,
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
    """Return the p99 TTFT minus the class's allowance for prompt length, which is the quantity that `ttft_s` bounds."""
    return _p99(
        [
            (record.first_ns - record.arrival_ns) / 1e9
            - service.ttft_per_1k_s * (record.request.input_tokens - record.cached_tokens) / 1000
            for record in members
            if record.first_ns
        ]
    )


def _round_up(value: float) -> float:
    """Round up to two significant digits."""
    if value <= 0:
        return value
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return round(math.ceil(value / unit - 1e-9) * unit, 6)
