"""Prometheus metrics of speculative prefill."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class SpeculativePrefillMetrics:
    """Counts of turns whose next turn was prefilled speculatively."""

    def __init__(self, registry: CollectorRegistry) -> None:
        text = "Conversation turns followed by a speculative prefill, by outcome; the engines count the tokens."
        self._prefilled_ahead = Counter("moiety_speculative_prefill", text, ("model", "outcome"), registry=registry)

    def observe(self, model: str, outcome: str) -> None:
        self._prefilled_ahead.labels(model, outcome).inc()
