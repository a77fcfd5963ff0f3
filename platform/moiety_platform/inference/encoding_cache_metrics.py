"""Prometheus metrics of the encoding cache, read at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moiety_text.segment_cache import SegmentCache


def encoding_cache_families(cache: SegmentCache) -> Iterator[Metric]:
    """Yield the metrics of one gateway's encoding cache."""
    tokens = CounterMetricFamily(
        "moiety_encoding_cache_tokens",
        "Tokens of conversations that the encoding cache had (`hit`), or that were encoded and stored (`miss`).",
        labels=["result"],
    )
    tokens.add_metric(["hit"], cache.num_hit_tokens)
    tokens.add_metric(["miss"], cache.num_missed_tokens)
    size = GaugeMetricFamily("moiety_encoding_cache_bytes", "Size of the encoding cache, in bytes.")
    size.add_metric([], cache.num_bytes)
    yield from (tokens, size)
