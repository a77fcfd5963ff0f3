"""Prometheus endpoint /metrics of an engine, served by its own thread: figures of the core and of the engine server.

The gateway exports the core's figures too, as `moiety_engine_…` with a label `engine`. Here they are `moiety_core_…`,
so that no sum counts them twice. Labels are bounded: the deployment's classes and the scheduler's reasons.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, Info, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_engine.errors import InvalidConfig
from moiety_engine.messages import CoreLoad
from moiety_wire import engine_load
from moiety_wire.engine_load import ClassLoad


@dataclass(frozen=True, slots=True)
class ServerStats:
    """State of an engine server at one moment."""

    load: CoreLoad
    num_gateways: int
    num_open: int
    num_unacknowledged: int
    num_undecodable: int
    num_refused: int
    is_ready: bool  # loaded and awake


class ServerCollector(Collector):
    """Prometheus collector of one engine server."""

    def __init__(self, read: Callable[[], ServerStats]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        stats = self._read()
        gauges = (
            ("ready", "1 if the model is loaded and the engine is awake.", stats.is_ready),
            ("gateways", "Connected gateways.", stats.num_gateways),
            ("open_requests", "Open requests of this engine.", stats.num_open),
            (
                "unacknowledged_requests",
                "Ended requests whose usage no gateway has acknowledged.",
                stats.num_unacknowledged,
            ),
        )
        for name, text, value in gauges:
            yield GaugeMetricFamily(f"moiety_engine_server_{name}", text, value)
        text = "Gateway messages that could not be decoded."
        yield CounterMetricFamily("moiety_engine_server_undecodable_messages", text, stats.num_undecodable)
        text = "Gateway messages that were refused as not permitted."
        yield CounterMetricFamily("moiety_engine_server_refused_messages", text, stats.num_refused)
        for name, text in engine_load.GAUGES:
            yield GaugeMetricFamily(f"moiety_core_{name.removesuffix('_total')}", text, getattr(stats.load, name))
        for name, text in engine_load.COUNTERS:
            yield CounterMetricFamily(f"moiety_core_{name}", text, getattr(stats.load, f"{name}_total"))
        yield from _classes(stats.load.classes)


def _classes(loads: list[ClassLoad]) -> Iterator[Metric]:
    for field, name, text in engine_load.CLASS_GAUGES:
        gauge = GaugeMetricFamily(f"moiety_core_class_{name}", text, labels=["service_class"])
        for load in loads:
            gauge.add_metric([load.name], getattr(load, field))
        yield gauge
    for name, text in engine_load.CLASS_COUNTERS:
        counter = CounterMetricFamily(f"moiety_core_class_{name}", text, labels=["service_class"])
        for load in loads:
            counter.add_metric([load.name], getattr(load, f"{name}_total"))
        yield counter
    for name, text in engine_load.CLASS_COUNTERS_BY_REASON:
        counter = CounterMetricFamily(f"moiety_core_class_{name}", text, labels=["service_class", "reason"])
        for load in loads:
            for reason, count in sorted(getattr(load, f"{name}_total").items()):
                counter.add_metric([load.name, reason], count)
        yield counter


class MetricsServer:
    """HTTP server of the metrics. The entry point owns and closes it.

    It listens before the engine server exists, so that an unusable address is reported at once.
    """

    def __init__(self, registry: CollectorRegistry, server: WSGIServer, thread: threading.Thread) -> None:
        self._registry, self._server, self._thread = registry, server, thread
        host, port = server.server_address[:2]
        self.url = f"http://{host!s}:{port}/metrics"

    @classmethod
    def listen(cls, address: str) -> MetricsServer:
        """Listen at host:port. Raises InvalidConfig."""
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise InvalidConfig(f"--metrics-listen {address!r} is not host:port; write for example 127.0.0.1:9400")
        registry = CollectorRegistry()
        ProcessCollector(registry=registry)
        Info("moiety_build", "Version of the running package.", registry=registry).info({"version": version("moiety")})
        try:
            return cls(registry, *start_http_server(int(port), host, registry))
        except (OSError, OverflowError) as exc:
            raise InvalidConfig(f"--metrics-listen {address}: {exc}; choose another") from exc

    def serve(self, read: Callable[[], ServerStats]) -> None:
        """Export the stats that `read` returns, from now on."""
        self._registry.register(ServerCollector(read))

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
