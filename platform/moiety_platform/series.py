"""Counts and times of one event loop, by labels, for Prometheus: what every request adds to, many times a request. The
library's own lock, look up and check at each step, for the sake of threads that there are none of here."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.utils import floatToGoString

Labels = tuple[str, ...]


class Counts(Collector):
    """A counter of each combination of labels that was seen."""

    def __init__(self, name: str, documentation: str, labels: Labels, registry: CollectorRegistry) -> None:
        self._describes = name, documentation, labels
        self._values: dict[Labels, int] = {}
        registry.register(self)

    def add(self, labels: Labels, amount: int = 1) -> None:
        """Nothing added makes a series all the same."""
        self._values[labels] = self._values.get(labels, 0) + amount

    def collect(self) -> Iterator[Metric]:
        name, documentation, labels = self._describes
        family = CounterMetricFamily(name, documentation, labels=labels)
        for values, count in self._values.items():
            family.add_metric(values, count)
        yield family


class Times(Collector):
    """A histogram of each combination of labels that was seen, in seconds. `bounds` ascend, each its own bucket's."""

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
