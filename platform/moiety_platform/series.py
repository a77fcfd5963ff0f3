"""Counters and histograms for Prometheus of one event loop, which every request updates many times.

Those of the library take locks, look up and check at each step, for threads that do not exist here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counts(Collector):
    """A counter per combination of labels."""

    def __init__(self, name: str, documentation: str, labels: Labels, registry: CollectorRegistry) -> None:
        self._describes = name, documentation, labels
        self._values: dict[Labels, int] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Add the amount; adding 0 creates the series, too."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        name, documentation, labels = self._describes
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, count in self._values.items():
            family.add_metric(values, count)
        yield family


class Times(Collector):
    """A histogram per combination of labels, in seconds. `bounds` are the ascending upper bounds of the buckets."""

    def __init__(
        self, name: str, documentation: str, labels: Labels, bounds: Sequence[float], registry: CollectorRegistry
    ) -> None:
        self._describes = name, documentation, labels
        self._bounds = tuple(bounds)
        self._told_bounds = [*map(floatToGoString, self._bounds), "+Inf"]
        self._counts: dict[Labels, list[int]] = {}  # by bucket
        self._sums: dict[Labels, float] = {}
        registry.register(self)

    def add(self, labels: Labels, seconds: float) -> None:
        counts = self._counts.get(labels)
        if counts is None:
            counts = self._counts[labels] = [0] * len(self._told_bounds)
            self._sums[labels] = 0.0
        counts[bisect_left(self._bounds, seconds)] += 1
        self._sums[labels] += seconds

    def collect(self) -> Iterator[Metric]:
        name, documentation, labels = self._describes
        family = HistogramMetricFamily(name, documentation, labels=labels)
        for values, counts in self._counts.items():
            up_to = list(zip(self._told_bounds, accumulate(counts), strict=True))
            family.add_metric(values, up_to, self._sums[values])
        yield family
