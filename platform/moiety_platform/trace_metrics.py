"""Prometheus metrics of traces and spans, read at each scrape, so that requests have no extra cost."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric

from moiety_platform.traces.tracing import Tracing


def trace_families(tracing: Tracing) -> Iterator[Metric]:
    """Yield the metrics of one gateway's traces."""
    verdicts = CounterMetricFamily(
        "moiety_trace_verdicts",
        "Ended requests by the sampling decision on their trace.",
        labels=["verdict"],
    )
    for verdict, count in tracing.sampler.counts.items():
        verdicts.add_metric([verdict.value], count)
    sent = CounterMetricFamily("moiety_spans_sent", "Spans that the destination accepted.", labels=["destination"])
    dropped = CounterMetricFamily(
        "moiety_spans_dropped",
        "Spans lost before delivery: the queue was full, or the destination did not accept them in time.",
        labels=["destination", "reason"],
    )
    for sender in tracing.senders:
        sent.add_metric([sender.name], sender.num_sent)
        for reason, count in tuple(sender.dropped.items()):
            dropped.add_metric([sender.name, reason], count)
    yield from (verdicts, sent, dropped)
