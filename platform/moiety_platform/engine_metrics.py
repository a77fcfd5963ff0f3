"""What engines say of themselves, for Prometheus: read from their last Load messages when they are scraped.

Labels are bounded: engines, the deployment's classes, the wire's reason codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.engine_client.base import EngineState
from moiety_wire.messages import ClassLoad

_CLASS = ("engine", "class")


class EngineCollector(Collector):
    """Of all engines that `states` tells of."""

    _GAUGES = (
        *("num_running", "num_waiting", "num_paused", "kv_blocks_total", "kv_blocks_used", "kv_blocks_cached"),
        *("host_blocks_total", "host_blocks_used"),
    )
    _COUNTERS = (
        *("steps", "prompt_tokens", "cached_tokens", "output_tokens", "requests"),
        *("swapped_out_blocks", "swapped_in_blocks", "overshot_tokens"),
    )
    _CLASS_GAUGES = (
        ("num_waiting", "num_waiting", "Requests of the class that wait."),
        ("num_running", "num_running", "Requests of the class in the batch."),
        ("predicted_ttft_s", "predicted_ttft_seconds", "Predicted time to first token of an empty prompt."),
    )
    _CLASS_COUNTERS = (
        ("admitted", "Requests admitted to the class."),
        ("downgraded", "Requests of the class that were served in its fallback."),
        ("relegated", "Requests that could not keep their promise any more and were put behind those that can."),
        ("boosted", "Requests that had waited too long and were put before others."),
        ("recomputed_tokens", "Tokens computed again after preemptions."),
    )
    _CLASS_COUNTERS_BY_REASON = (
        ("rejected", "Requests of the class that were rejected."),
        ("preempted", "Preemptions of the class's requests."),
    )

    def __init__(self, states: Callable[[], Sequence[EngineState]]) -> None:
        self._states = states

    def collect(self) -> Iterator[Metric]:
        states = self._states()
        up = GaugeMetricFamily("moiety_engine_up", "1 if the engine can take requests.", labels=("engine",))
        for state in states:
            up.add_metric((state.address,), float(state.can_take))
        yield up
        loads = [(state.address, state.load) for state in states if state.load is not None]
        for name in self._GAUGES:
            gauge = GaugeMetricFamily(f"moiety_engine_{name}", f"The engine's last {name}.", labels=("engine",))
            for address, load in loads:
                gauge.add_metric((address,), getattr(load, name))
            yield gauge
        for name in self._COUNTERS:
            counter = CounterMetricFamily(f"moiety_engine_{name}", f"The engine's {name} so far.", labels=("engine",))
            for address, load in loads:
                counter.add_metric((address,), getattr(load, f"{name}_total"))
            yield counter
        yield from self._collect_classes([(address, one) for address, load in loads for one in load.classes])

    def _collect_classes(self, loads: Sequence[tuple[str, ClassLoad]]) -> Iterator[Metric]:
        for field, name, text in self._CLASS_GAUGES:
            gauge = GaugeMetricFamily(f"moiety_engine_class_{name}", text, labels=_CLASS)
            for address, load in loads:
                gauge.add_metric((address, load.name), getattr(load, field))
            yield gauge
        for name, text in self._CLASS_COUNTERS:
            counter = CounterMetricFamily(f"moiety_engine_class_{name}", text, labels=_CLASS)
            for address, load in loads:
                counter.add_metric((address, load.name), getattr(load, f"{name}_total"))
            yield counter
        for name, text in self._CLASS_COUNTERS_BY_REASON:
            counter = CounterMetricFamily(f"moiety_engine_class_{name}", text, labels=(*_CLASS, "reason"))
            for address, load in loads:
                for reason, count in sorted(getattr(load, f"{name}_total").items()):
                    counter.add_metric((address, load.name, reason), count)
            yield counter
