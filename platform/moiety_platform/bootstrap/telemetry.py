"""Exporters of a gateway's spans and metrics.

Fails open: what cannot be sent is counted, and no request waits for it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from prometheus_client import CollectorRegistry

from moiety_platform.live_settings import CannotApplySetting, LiveSettings, PreparedChange
from moiety_platform.settings import GatewaySettings
from moiety_platform.traces.sampling import SamplingTerms
from moiety_platform.traces.tracing import Sender, Tracing

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import MetricExporter

    from moiety_platform.otlp_metrics import MetricSender


class CannotSendSpans(CannotApplySetting):
    """A package that the span exporter needs is not installed; the message says which."""


def sampling_of(settings: GatewaySettings) -> SamplingTerms:
    return SamplingTerms(
        settings.trace_sample_rate, settings.trace_sample_rates, settings.trace_first_per_s, settings.trace_max_per_s
    )


class Telemetry:
    """Tracing and metric export of a gateway. Owned and closed by the entry point."""

    def __init__(
        self, settings: GatewaySettings, registry: CollectorRegistry, process_id: str, senders: Sequence[Sender] = ()
    ) -> None:
        """Create the span senders of the settings, beside those given. Raises CannotSendSpans."""
        self._given = tuple(senders)
        self._process_id = process_id
        self._registry = registry
        self._leaving: set[asyncio.Task[None]] = set()
        self.tracing = Tracing(sampling_of(settings), [*self._given, *self._senders(settings)])
        self._metrics: MetricSender | None = None

    def send_metrics(self, settings: GatewaySettings) -> None:
        """Start the metric export, once all collectors are registered."""
        self._metrics = self._metric_sender(settings, _metric_exporter(settings))

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        live.follow(["trace_sample_rate", "trace_sample_rates", "trace_first_per_s", "trace_max_per_s"], self.sample)
        live.follow_with(["otlp_endpoint", "otlp_protocol", "traces_endpoint", "traces_token"], self.follow_spans)
        live.follow_with(["otlp_metrics_endpoint", "otlp_metrics_interval_ms"], self.follow_metrics)

    async def close(self) -> None:
        """Send the rest. Takes seconds at most."""
        if self._leaving:
            await asyncio.wait(self._leaving)
        if self._metrics is not None:
            await asyncio.to_thread(self._metrics.close)
        await asyncio.to_thread(self.tracing.close)

    def sample(self, settings: GatewaySettings) -> None:
        """Use the sampling rates of these settings from now on."""
        self.tracing.sampler.terms = sampling_of(settings)

    async def follow_spans(self, settings: GatewaySettings) -> PreparedChange:
        """Prepare span senders for the new settings. Raises CannotSendSpans."""
        senders = await asyncio.to_thread(self._senders, settings)

        def commit() -> None:
            before = self.tracing.use([*self._given, *senders])
            self._give_up(one for one in before if one not in self._given)

        return PreparedChange(commit, lambda: _closed(senders))

    async def follow_metrics(self, settings: GatewaySettings) -> PreparedChange:
        exporter = await asyncio.to_thread(_metric_exporter, settings)

        def commit() -> None:
            if (before := self._metrics) is not None:
                before.withdraw()
                self._give_up([before])
            self._metrics = self._metric_sender(settings, exporter)

        return PreparedChange(commit)

    def _give_up(self, senders: Iterable[Sender | MetricSender]) -> None:
        self._later(_closed(tuple(senders)))

    def _later(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    def _senders(self, settings: GatewaySettings) -> list[Sender]:
        if settings.traces_endpoint is None and settings.otlp_endpoint is None:
            return []
        from moiety_platform.traces.exporters import (  # noqa: PLC0415  # slow
            Exporter,
            grpc_exporter,
            otlp_exporter,
            store_exporter,
        )
        from moiety_platform.traces.sender import SpanSender  # noqa: PLC0415  # slow

        exporters: list[tuple[str, Exporter]] = []
        if settings.traces_endpoint is not None:
            token = settings.traces_token.get_secret_value() if settings.traces_token else None
            exporters.append(("store", store_exporter(settings.traces_endpoint, token)))
        if settings.otlp_endpoint is not None:
            make = grpc_exporter if settings.otlp_protocol == "grpc" else otlp_exporter
            try:
                exporters.append(("otlp", make(settings.otlp_endpoint)))
            except ModuleNotFoundError as exc:
                raise CannotSendSpans(f"OTLP over gRPC needs {exc.name}: pip install 'moiety[grpc]'") from exc
        return [SpanSender(name, exporter, self._process_id) for name, exporter in exporters]

    def _metric_sender(self, settings: GatewaySettings, exporter: MetricExporter | None) -> MetricSender | None:
        if exporter is None:
            return None
        from moiety_platform.otlp_metrics import MetricSender  # noqa: PLC0415  # slow to import

        interval_s = settings.otlp_metrics_interval_ms / 1000
        return MetricSender(self._registry, exporter, self._process_id, interval_s=interval_s)


def _metric_exporter(settings: GatewaySettings) -> MetricExporter | None:
    if settings.otlp_metrics_endpoint is None:
        return None
    from moiety_platform.otlp_metrics import otlp_metric_exporter  # noqa: PLC0415  # slow to import

    return otlp_metric_exporter(settings.otlp_metrics_endpoint)


async def _closed(senders: Iterable[Sender | MetricSender]) -> None:
    for sender in senders:
        await asyncio.to_thread(sender.close)
