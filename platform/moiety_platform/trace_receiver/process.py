"""The trace store's process: opens its resources, receives spans until a signal, stores the rest, and closes."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import structlog
import uvloop
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from moiety_platform.connections import ConnectionLimits
from moiety_platform.db.now import now_ms
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import Database
from moiety_platform.http_server import HttpServer
from moiety_platform.listening import bind
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import configure_logging, set_log_level
from moiety_platform.machine_limits import MachineLimits
from moiety_platform.metrics import new_registry
from moiety_platform.reloading.reloader import Reloader, ReloadMetrics, watching
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.service import RetentionJob, RetentionService
from moiety_platform.trace_receiver.app import TraceApp, TraceTokens
from moiety_platform.trace_receiver.settings import TraceSettings
from moiety_platform.trace_receiver.writer import TraceWriter
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.trace_store.store import Now, purge_of
from moiety_wire.heartbeat import sending_heartbeats

DRAIN_S = 2
DAY_MS = 24 * 3600 * 1000
LIMITS = ConnectionLimits(
    max_header_bytes=32 * 1024, max_headers=100, header_timeout_s=15, body_timeout_s=30, send_timeout_s=60,
    keep_alive_s=60,
)  # fmt: skip

log = structlog.get_logger(__name__)


def run_trace_store(source: SettingsSource[TraceSettings]) -> None:
    """Serve until SIGINT or SIGTERM. Raises AddressUnavailable.

    SIGHUP reloads the configuration file, if there is one.
    """
    settings = source.first
    configure_logging(settings.log_level, settings.log_format)
    listener = bind(settings.traces_host, settings.traces_port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(source, listener))


async def _serve(source: SettingsSource[TraceSettings], listener: socket.socket) -> None:
    live = LiveSettings(source.first)
    live.follow(["log_level"], lambda settings: set_log_level(settings.log_level))
    machine = MachineLimits(source.first.data_dir)
    await machine.start()
    try:
        await _serve_live(source, live, listener)
    finally:
        await machine.stop()
    log.info("traces_stopped")


async def _serve_live(
    source: SettingsSource[TraceSettings], live: LiveSettings[TraceSettings], listener: socket.socket
) -> None:
    async with build_app(source.first, live=live) as app:
        assert not live.unfollowed, live.unfollowed
        told = ReloadMetrics(app.registry)
        reloader = None if source.path is None else Reloader(source, live, told)
        server = HttpServer(app, DRAIN_S, LIMITS)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, server.request_exit)
        host, port = listener.getsockname()[:2]
        log.info("traces_listening", host=host, port=port)
        async with watching(reloader):
            with sending_heartbeats(os.environ):
                await server.serve([listener])


@asynccontextmanager
async def build_app(
    settings: TraceSettings, now: Now = now_ms, *, live: LiveSettings[TraceSettings] | None = None
) -> AsyncIterator[TraceApp]:
    """Open the store with its background services; on exit, close it once all received spans are stored.

    `now` is the database's clock. The application follows the `live` settings, if given.
    """
    database = Database.open(settings.store_url)
    registry = new_registry()
    writer = TraceWriter(database, settings.traces_queue_spans)
    registry.register(_Stored(writer))
    store = StoreReadiness(database)
    owner = f"{socket.gethostname()[:24]}-{secrets.token_hex(12)}"
    jobs, counts = retention_jobs_of(settings, now), RetentionMetrics(registry)
    retention = RetentionService(owner, database, jobs, counts, interval_s=settings.retention_interval_s, now=now)
    app = TraceApp(tokens_of(settings), writer, store, registry, settings.traces_max_body_bytes)

    def use(settings: TraceSettings) -> None:
        app.tokens, app.max_body_bytes = tokens_of(settings), settings.traces_max_body_bytes
        writer.max_spans = settings.traces_queue_spans

    if live is not None:
        live.follow(["traces_token", "traces_untrusted_token", "traces_max_body_bytes", "traces_queue_spans"], use)
        live.follow(
            ["keep_traces_days", "retention_interval_s"],
            lambda settings: retention.use(retention_jobs_of(settings, now), settings.retention_interval_s),
        )
    await writer.start()
    await retention.start()
    try:
        yield app
    finally:
        await retention.stop()
        await writer.stop()
        await store.close()
        await database.close()


def tokens_of(settings: TraceSettings) -> TraceTokens:
    untrusted = settings.traces_untrusted_token
    return TraceTokens(settings.traces_token.get_secret_value(), untrusted.get_secret_value() if untrusted else None)


def retention_jobs_of(settings: TraceSettings, now: Now = now_ms) -> list[RetentionJob]:
    """Return the retention jobs, spans before the traces that find them."""
    keep_ms = round(settings.keep_traces_days * DAY_MS)
    return [
        RetentionJob("spans", purge_of(SpanRecord, keep_ms, now)),
        RetentionJob("traces", purge_of(TraceRecord, keep_ms, now)),
    ]


class _Stored(Collector):
    """Counts of the received spans by outcome."""

    def __init__(self, writer: TraceWriter) -> None:
        self._writer = writer

    def collect(self) -> Iterator[Metric]:
        family = CounterMetricFamily("moiety_traces_spans", "Received spans, by outcome.", labels=["outcome"])
        family.add_metric(["stored"], self._writer.num_stored)
        family.add_metric(["refused_by_database"], self._writer.num_dropped)
        yield family
