"""Metrics of circuit breakers: outcomes of requests at each engine. Labels are bounded: engines and outcomes."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moiety_platform.routing.circuit_breaker import BreakerState, ReplicaBreakers

_ENGINE = ("engine",)
_STATES = {BreakerState.CLOSED: 0, BreakerState.HALF_OPEN: 1, BreakerState.OPEN: 2}


def breaker_families(breakers: ReplicaBreakers) -> Iterator[Metric]:
    """Yield the metrics of one gateway process's circuit breakers."""
    state_gauge = GaugeMetricFamily(
        "moiety_engine_circuit_state",
        "State of the engine's circuit breaker: 0 closed, 1 half-open, 2 open.",
        labels=_ENGINE,
    )
    openings = CounterMetricFamily(
        "moiety_engine_circuit_openings", "Times that the engine's circuit breaker has opened.", labels=_ENGINE
    )
    outcomes = CounterMetricFamily(
        "moiety_engine_outcomes",
        "Ended requests of the engine, by outcome as the circuit breaker counts it.",
        labels=("engine", "outcome"),
    )
    for address, state, num_openings in breakers.states():
        state_gauge.add_metric((address,), _STATES[state])
        openings.add_metric((address,), num_openings)
    for address, kind, count in breakers.counts():
        outcomes.add_metric((address, kind.value), count)
    yield from (state_gauge, openings, outcomes)
