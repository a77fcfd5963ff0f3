"""Prometheus metrics of the documents that one gateway reads, listed in docs/metrics.md."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.document_extraction.frames import RefusalReason
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.metrics import TTFT_BUCKETS_S, LabeledCounters, LatencyHistograms

PDF, TEXT = "pdf", "text"  # kinds of documents


class DocumentMetrics(Collector):
    """Metrics of one gateway process. `num_requests` returns how many requests read documents or wait to."""

    def __init__(self, registry: CollectorRegistry, cache: DocumentTextCache, num_requests: Callable[[], int]) -> None:
        self._cache, self._num_requests = cache, num_requests
        seconds = "Time in which a document was read, with the wait for a process; those of the cache are not counted."
        self._seconds = LatencyHistograms("moiety_document_read_seconds", seconds, ("kind",), TTFT_BUCKETS_S, registry)
        refusals = "Documents that were refused, by reason; those of the cache are counted again."
        self._refusals = LabeledCounters("moiety_document_refusals", refusals, ("reason",), registry)
        for reason in RefusalReason:
            self._refusals.add((reason.value,), 0)
        registry.register(self)

    def observe_read(self, kind: str, seconds: float) -> None:
        """Count a document whose text was read."""
        self._seconds.add((kind,), seconds)

    def observe_refusal(self, reason: RefusalReason) -> None:
        self._refusals.add((reason.value,))

    def collect(self) -> Iterator[Metric]:
        requests = "Requests whose documents are read or wait for it."
        yield GaugeMetricFamily("moiety_document_requests", requests, self._num_requests())
        hits = "PDF files whose text, or whose refusal, was found in the cache."
        yield CounterMetricFamily("moiety_document_cache_hits", hits, self._cache.num_hits)
        misses = "PDF files that were not found in the cache, and had to be read."
        yield CounterMetricFamily("moiety_document_cache_misses", misses, self._cache.num_misses)
        size = "Size of the cached texts of PDF files, in bytes."
        yield GaugeMetricFamily("moiety_document_cache_bytes", size, self._cache.num_bytes)
