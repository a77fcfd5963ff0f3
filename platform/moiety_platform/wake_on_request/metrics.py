"""Metrics of engines that are woken by requests. Labels are bounded: the models of engines and of the settings."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moiety_platform.wake_on_request.waker import EngineWaker

_MODEL = ("model",)


def wake_families(waker: EngineWaker) -> Iterator[Metric]:
    """Yield the metrics of one gateway process's waker; without `wake_on_request` they have no samples."""
    waiting = GaugeMetricFamily(
        "moiety_wake_waiting_requests",
        "Requests that wait until an engine of their model is awake.",
        labels=_MODEL,
    )
    demands = GaugeMetricFamily(
        "moiety_wake_demands",
        "Waiting requests, or 1 for 30 s after a request that does not wait: a batch line, a request of a route "
        "with a fallback, or a rejected request. An autoscaler starts engines by it.",
        labels=_MODEL,
    )
    wakes = CounterMetricFamily(
        "moiety_wakes", "Engines woken and StatefulSets started by this gateway.", labels=_MODEL
    )
    rejected = CounterMetricFamily(
        "moiety_wake_rejected_requests",
        "Requests rejected with 503 because no engine of their model was awake in time.",
        labels=_MODEL,
    )
    seconds = GaugeMetricFamily(
        "moiety_wake_seconds",
        "Measured time until an engine serves after it was woken (wake) or started (start).",
        labels=("model", "kind"),
    )
    ready = GaugeMetricFamily(
        "moiety_wake_ready",
        "1 while an engine serves, sleeps or can be started by a request, and 0 if engines that no request starts "
        "are lost.",
    )
    if waker.settings.wake_on_request:
        ready.add_metric((), int(waker.is_ready))
    for model, count in waker.waiting().items():
        waiting.add_metric((model,), count)
    for model, count in waker.demands().items():
        demands.add_metric((model,), count)
    for model, count in waker.num_wakes.items():
        wakes.add_metric((model,), count)
    for model, count in waker.num_rejected.items():
        rejected.add_metric((model,), count)
    for kind, times in waker.measured().items():
        for model, time_s in times.items():
            seconds.add_metric((model, kind.value), time_s)
    yield from (ready, waiting, demands, wakes, rejected, seconds)
