"""Prometheus metrics of engines, read at each scrape from their last Load messages.

Labels are bounded: engines, the deployment's classes, the protocol's reason codes. Several gateways report an engine
that they share; `max by (engine)` counts it once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.engine_client.base import EngineState
from moiety_wire import engine_load
from moiety_wire.engine_load import ClassLoad, SleepState

_ENGINE = ("engine",)
_CLASS = ("engine", "service_class")


class EngineCollector(Collector):
    """Collector of all engines in `states`."""

    def __init__(self, states: Callable[[], Sequence[EngineState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = self._states()
        yield from self._collect_links(states)
        loads = [(state.address, state.load) for state in states if state.load is not None]
        for name, text in engine_load.GAUGES:
            gauge = GaugeMetricFamily(f"moiety_engine_{name.removesuffix('_total')}", text, labels=_ENGINE)
            for address, load in loads:
                gauge.add_metric((address,), getattr(load, name))
            yield gauge
        for name, text in engine_load.COUNTERS:
            counter = CounterMetricFamily(f"moiety_engine_{name}", text, labels=_ENGINE)
            for address, load in loads:
                counter.add_metric((address,), getattr(load, f"{name}_total"))
            yield counter
        yield from self._collect_classes([(address, one) for address, load in loads for one in load.classes])

    def _collect_links(self, states: Sequence[EngineState]) -> Iterator[Metric]:
        """Yield the state of this gateway's connections to the engines."""
        up = GaugeMetricFamily("moiety_engine_up", "1 if the engine accepts requests.", labels=_ENGINE)
        inflight = GaugeMetricFamily(
            "moiety_engine_inflight", "Open requests of this gateway on the engine.", labels=_ENGINE
        )
        asleep = GaugeMetricFamily("moiety_engine_asleep", "1 while the engine is in sleep mode.", labels=_ENGINE)
        age = GaugeMetricFamily(
            "moiety_engine_load_age_seconds", "Age of the engine's last load report.", labels=_ENGINE
        )
        for state in states:
            up.add_metric((state.address,), float(state.can_take))
            asleep.add_metric((state.address,), float(state.sleep is SleepState.ASLEEP))
            inflight.add_metric((state.address,), state.num_inflight)
            if state.load_age_s is not None:
                age.add_metric((state.address,), state.load_age_s)
        yield from (up, asleep, inflight, age)

    def _collect_classes(self, loads: Sequence[tuple[str, ClassLoad]]) -> Iterator[Metric]:
        for field, name, text in engine_load.CLASS_GAUGES:
            gauge = GaugeMetricFamily(f"moiety_engine_class_{name}", text, labels=_CLASS)
            for address, load in loads:
                gauge.add_metric((address, load.name), getattr(load, field))
            yield gauge
        for name, text in engine_load.CLASS_COUNTERS:
            counter = CounterMetricFamily(f"moiety_engine_class_{name}", text, labels=_CLASS)
            for address, load in loads:
                counter.add_metric((address, load.name), getattr(load, f"{name}_total"))
            yield counter
        for name, text in engine_load.CLASS_COUNTERS_BY_REASON:
            counter = CounterMetricFamily(f"moiety_engine_class_{name}", text, labels=(*_CLASS, "reason"))
            for address, load in loads:
                for reason, count in sorted(getattr(load, f"{name}_total").items()):
                    counter.add_metric((address, load.name, reason), count)
            yield counter
