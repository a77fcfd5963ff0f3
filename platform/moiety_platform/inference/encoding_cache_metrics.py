"""Prometheus metrics of the encoding cache, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_text.segment_cache import SegmentCache


class EncodingCacheCollector(Collector):
    """Collector of one gateway's encoding cache."""

    def __init__(self, cache: SegmentCache) -> None:
        self._cache = cache

    def collect(self) -> Iterator[Metric]:
        tokens = CounterMetricFamily(
            "moiety_encoding_cache_tokens",
            "Tokens of conversations that the encoding cache had, or that were encoded and stored in it.",
            labels=["result"],
        )
        tokens.add_metric(["hit"], self._cache.num_hit_tokens)
        tokens.add_metric(["miss"], self._cache.num_missed_tokens)
        size = GaugeMetricFamily("moiety_encoding_cache_bytes", "Size of the encoding cache.")
        size.add_metric([], self._cache.num_bytes)
        yield from (tokens, size)
