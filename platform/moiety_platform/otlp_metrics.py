"""Exporter of metrics by OTLP/HTTP, in a separate thread: periodically sends the same series as /metrics.

Names are those of /metrics, without `_total`; metrics of OpenTelemetry's conventions for generative AI have their names
and attributes there. Fails open: no request waits, and a failed export is counted and covered by the next sums.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version

import structlog
from opentelemetry.exporter.otlp.proto.http import Compression
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics.export import (
    AggregationTemporality,
    Gauge,
    Histogram,
    HistogramDataPoint,
    Metric,
    MetricExporter,
    MetricExportResult,
    MetricsData,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
    Sum,
)
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily
from prometheus_client.core import Metric as Family
from prometheus_client.registry import Collector

from moiety_platform.metric_scrape import families_in_turns

SERVICE_NAME = "moiety-gateway"
EXPORT_TIMEOUT_S = 10.0
LAST_EXPORT_S = 1.0
COLLECT_S = 5.0  # longest wait for a busy event loop
TAKEN, NOT_TAKEN = "taken", "not_taken"

_GEN_AI = "gen_ai_server_"
_ATTRIBUTES = {
    "operation": "gen_ai.operation.name",
    "model": "gen_ai.request.model",
    "service_class": "moiety.service_class",
    "outcome": "moiety.outcome",
}
_PROVIDER = {"gen_ai.provider.name": "moiety"}
_UNITS = {"seconds": "s", "bytes": "By", "tokens": "{token}", "requests": "{request}"}
_CUMULATIVE = AggregationTemporality.CUMULATIVE

log = structlog.get_logger(__name__)


def otlp_metric_exporter(endpoint: str) -> MetricExporter:
    """Return an exporter to exactly that address. Headers come from OpenTelemetry's environment variables."""
    return OTLPMetricExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S, compression=Compression.Gzip)


class MetricSender(Collector):
    """Background exporter, created in the event loop of the entry point, which closes it.

    It reports its own exports at /metrics.
    """

    def __init__(
        self, registry: CollectorRegistry, exporter: MetricExporter, instance_id: str, *, interval_s: float
    ) -> None:
        self.counts = {TAKEN: 0, NOT_TAKEN: 0}
        self._registry = registry
        self._exporter = exporter
        self._interval_s = interval_s
        self._resource = Resource.create({"service.name": SERVICE_NAME, "service.instance.id": instance_id})
        self._scope = InstrumentationScope("moiety_platform", version("moiety"))
        self._start_ns = time.time_ns()
        self._loop = asyncio.get_running_loop()
        self._closing = threading.Event()
        registry.register(self)
        self._thread = threading.Thread(target=self._run, name="metrics by otlp", daemon=True)
        self._thread.start()

    def collect(self) -> Iterator[Family]:
        exports = CounterMetricFamily(
            "moiety_metric_exports", "OTLP exports of metrics, by outcome.", labels=["outcome"]
        )
        for outcome, count in self.counts.items():
            exports.add_metric([outcome], count)
        yield exports

    def withdraw(self) -> None:
        """Stop reporting at /metrics, since another sender takes over; call it once."""
        self._registry.unregister(self)

    def close(self, timeout_s: float = LAST_EXPORT_S) -> None:
        """Export a last time, within the timeout. Idempotent. Not from the event loop, which collects the metrics."""
        self._closing.set()
        self._thread.join(timeout_s)
        self._exporter.shutdown()

    def _run(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._closing.wait(self._interval_s)
            try:
                families = self._families()
                result = self._exporter.export(self._data(families))
            except Exception:  # top level of a thread that lives as long as the process
                log.exception("metrics_not_sent")
                result = MetricExportResult.FAILURE
            self.counts[TAKEN if result is MetricExportResult.SUCCESS else NOT_TAKEN] += 1

    def _families(self) -> list[Family]:
        """Read the metrics in the event loop, which owns them. Raises TimeoutError."""

        async def read() -> list[Family]:
            return [family async for family in families_in_turns(self._registry)]

        return asyncio.run_coroutine_threadsafe(read(), self._loop).result(COLLECT_S)

    def _data(self, families: Sequence[Family]) -> MetricsData:
        now_ns = time.time_ns()
        metrics = [metric_of(family, self._start_ns, now_ns) for family in families if family.samples]
        scopes = [ScopeMetrics(self._scope, metrics, "")]
        return MetricsData([ResourceMetrics(self._resource, scopes, "")])


def metric_of(family: Family, start_ns: int, now_ns: int) -> Metric:
    """Return a family in OpenTelemetry's form: a monotonic sum, a gauge or a histogram."""
    stem, _, last = family.name.rpartition("_")
    is_gen_ai = family.name.startswith(_GEN_AI)
    name = "gen_ai.server." + stem.removeprefix(_GEN_AI) if is_gen_ai else family.name
    attributes = _gen_ai_attributes if is_gen_ai else dict
    data: Sum | Gauge | Histogram
    if family.type == "histogram":
        data = Histogram(list(_histograms(family, attributes, start_ns, now_ns)), _CUMULATIVE)
    else:
        suffix = "_total" if family.type == "counter" else "_info" if family.type == "info" else ""
        points = [
            NumberDataPoint(attributes(sample.labels), start_ns, now_ns, float(sample.value))
            for sample in family.samples
            if sample.name == family.name + suffix
        ]
        data = Sum(points, _CUMULATIVE, is_monotonic=True) if family.type == "counter" else Gauge(points)
    return Metric(name, family.documentation, _UNITS.get(last, "1"), data)


def _gen_ai_attributes(labels: Mapping[str, str]) -> dict[str, str]:
    return _PROVIDER | {_ATTRIBUTES[name]: value for name, value in labels.items()}


def _histograms(
    family: Family, attributes: Callable[[Mapping[str, str]], dict[str, str]], start_ns: int, now_ns: int
) -> Iterator[HistogramDataPoint]:
    """Yield a point of each series. Prometheus counts up to each bound; OpenTelemetry between the bounds."""
    series: dict[tuple[tuple[str, str], ...], list[tuple[float, float]]] = {}
    sums: dict[tuple[tuple[str, str], ...], float] = {}
    for sample in family.samples:
        labels = {name: value for name, value in sample.labels.items() if name != "le"}
        key = tuple(labels.items())
        if sample.name.endswith("_bucket"):
            series.setdefault(key, []).append((float(sample.labels["le"]), sample.value))
        elif sample.name.endswith("_sum"):
            sums[key] = sample.value
    for key, cumulated in series.items():
        counts = [value for _, value in cumulated]
        between = [int(count - before) for count, before in zip(counts, [0.0, *counts], strict=False)]
        bounds = [bound for bound, _ in cumulated[:-1]]
        yield HistogramDataPoint(
            attributes(dict(key)), start_ns, now_ns, int(counts[-1]), sums[key], between, bounds,
            min=None, max=None,  # type: ignore[arg-type]  # not known, so left out of the message
        )  # fmt: skip
