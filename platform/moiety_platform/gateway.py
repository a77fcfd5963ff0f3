"""The gateway process: opens its resources, serves HTTP until a signal, drains, and closes everything in order."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import os
import secrets
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import structlog
import uvicorn
import uvloop
from litestar import Litestar

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.administration.router import admin_router
from moiety_platform.app import Services, create_app, create_operations_app, create_pipeline
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.pepper import pepper_of, pepper_rotation_of
from moiety_platform.batches.assembly import Batches
from moiety_platform.bootstrap.administration import Administration
from moiety_platform.bootstrap.engines import Engines, key_files
from moiety_platform.bootstrap.oidc_authentication import OidcAuthentication
from moiety_platform.bootstrap.telemetry import Telemetry
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import SystemClock
from moiety_platform.connections import ConnectionLimits, ServerConfig
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import CHECKING, LOOKING, SERVING, Database
from moiety_platform.idempotency.key_store_client import IdempotencyKeys, KeepingLimits
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.listening import BACKLOG, bind
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import configure_logging, set_log_level
from moiety_platform.metrics import Metrics, RetentionMetrics, SpeculativePrefillMetrics
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.prices.cache import PriceCache
from moiety_platform.quota.keeper import LEASE_S, QuotaKeeper
from moiety_platform.quota.store import LeaseStore
from moiety_platform.reloading.reloader import Reloader, ReloadMetrics, watching
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.responses_api.keeper import ConversationLimits, ResponseKeeper
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.service import RetentionService
from moiety_platform.settings import GatewaySettings
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill
from moiety_platform.store_metrics import StoreCollector
from moiety_platform.trace_metrics import TraceCollector
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder

LAST_RECORDS_S = 10.0
OPERATIONS_DRAIN_S = 1  # wait of a shutdown for a running scrape
OF_RETENTION = (
    "retention_interval_s", "keep_files_days", "keep_batches_days", "keep_requests_days", "keep_limit_windows_days",
)  # fmt: skip
M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h
RARELY = (20_000, 50, 100)  # a request leaves few reference cycles, so frequent garbage collections waste time

log = structlog.get_logger(__name__)


def run_gateway(source: SettingsSource[GatewaySettings]) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends without draining.

    SIGHUP reloads the configuration file, if there is one. Raises AddressUnavailable, CannotUseEngine or
    CannotSendSpans.
    """
    settings = source.first
    configure_logging(settings.log_level, settings.log_format)
    _share_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # for batches of texts, and here they arrive one by one
    listener, operations = bind(settings.host, settings.port), None
    if settings.operations_port is not None:
        operations = bind(settings.operations_host, settings.operations_port, "--operations-port")
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(source, listener, operations))


def _share_arenas() -> None:
    """Let threads allocate from few malloc arenas.

    By default glibc gives each database thread an arena of its own, which never returns memory. No effect on other
    systems.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


async def _serve(
    source: SettingsSource[GatewaySettings], listener: socket.socket, operations_listener: socket.socket | None
) -> None:
    async with assembled(source) as (services, server, operations):
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, server.request_exit)
        host, port = listener.getsockname()[:2]
        gc.collect()
        gc.set_threshold(*RARELY)
        gc.freeze()  # collections need not scan objects that live as long as the process
        async with watching(services.reloader):
            engines = list(source.first.engines)
            log.info("gateway_listening", host=host, port=port, engines=engines)
            async with serving_operations(operations, operations_listener):
                await server.serve([listener])
        log.info("gateway_stopped")


@asynccontextmanager
async def serving_operations(server: GatewayServer, listener: socket.socket | None) -> AsyncIterator[None]:
    """Serve the operations pages on that listener, if there is one, until the block ends.

    Their metrics remain readable while the gateway drains.
    """
    if listener is None:
        yield
        return
    host, port = listener.getsockname()[:2]
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(server.serve([listener]))
        log.info("operations_listening", host=host, port=port)
        yield
        server.request_exit()


@asynccontextmanager
async def assembled(
    source: SettingsSource[GatewaySettings],
) -> AsyncIterator[tuple[Services, GatewayServer, GatewayServer]]:
    """Open a gateway except for its listeners: its services, its server and the server of the operations pages.

    Asserts that every live setting has a follower.
    """
    settings = source.first
    async with build_services(source) as services:
        pipeline = create_pipeline(settings, services)
        app = create_app(settings, services, pipeline)
        assert services.batches is not None, "a gateway with a store has batches"
        assert services.live is not None, "and settings that may change"
        server = GatewayServer(app, settings.drain_s, ConnectionLimits.of(settings), on_draining=services.batches.drain)
        server.followed_by(services.live)
        live = services.live
        operations_app = create_operations_app(services, app, lambda: live.now, lambda: server.should_exit)
        operations = GatewayServer(operations_app, OPERATIONS_DRAIN_S, ConnectionLimits.of(settings))
        services.live.follow(["log_level"], lambda wanted: set_log_level(wanted.log_level))
        assert not services.live.unfollowed, services.live.unfollowed
        async with services.batches.working(pipeline):
            yield services, server, operations


class GatewayServer(uvicorn.Server):
    """uvicorn with our limits, and without its signal handlers, which would end the process before it cleans up."""

    def __init__(
        self,
        app: Litestar,
        drain_s: int,
        limits: ConnectionLimits,
        on_started: Callable[[], None] = lambda: None,
        on_draining: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_started = on_started
        self._on_draining = on_draining
        self._limited = ServerConfig(
            app,
            limits,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            timeout_graceful_shutdown=drain_s,
            backlog=BACKLOG,
        )
        super().__init__(self._limited)

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        """Follow the limits of connections. Running requests keep their limits."""
        live.follow([*ConnectionLimits.__dataclass_fields__, "drain_s"], self._use)

    def _use(self, settings: GatewaySettings) -> None:
        self._limited.use(ConnectionLimits.of(settings))
        self._limited.timeout_graceful_shutdown = settings.drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_exit(self) -> None:
        """Drain; at the second call, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_draining()


@asynccontextmanager
async def build_services(source: SettingsSource[GatewaySettings]) -> AsyncIterator[Services]:
    """Open everything that the application needs; close it in reverse order, so that no usage row is lost."""
    settings = source.first
    clock, metrics, live = SystemClock(), Metrics(settings.metrics_tenants), LiveSettings(settings)
    pepper, turn = pepper_of(settings), pepper_rotation_of(settings)
    async with AsyncExitStack() as stack:
        process_id = f"{socket.gethostname()[:24]}-{secrets.token_hex(12)}"
        telemetry = Telemetry(settings, metrics.registry, process_id)
        stack.push_async_callback(telemetry.close)
        metrics.registry.register(TraceCollector(telemetry.tracing))
        database, looked_at, keys, traces = _open_stores(stack, settings)
        metrics.watch_statements(lambda: sum(one.num_statements for one in (database, looked_at, keys)))
        store, objects, objects_ready = _open_objects(stack, settings, database)
        usage = UsageRecorder(database, settings.usage_journal_dir)
        await usage.start()
        stack.push_async_callback(usage.stop)
        quotas = QuotaKeeper(database, LeaseStore(process_id, LEASE_S), clock, ttl_s=LEASE_S)
        await quotas.start()
        stack.push_async_callback(quotas.stop)
        idempotency = await _start_idempotency(stack, settings, database)
        responses = ResponseKeeper(database, ConversationLimits.of(settings))
        recorder = RequestRecorder(usage, quotas, metrics, telemetry.tracing, clock)
        stack.push_async_callback(recorder.wait_idle, LAST_RECORDS_S)
        meter = MeterReader(database, usage.holds)
        await meter.start()
        stack.push_async_callback(meter.stop)
        metrics.registry.register(StoreCollector(clock, store, usage, quotas, meter, recorder))
        engines = await stack.enter_async_context(
            Engines(settings, clock, quotas.replica_id, meter, AdapterContents(database, objects))
        )
        quotas.quarantine.is_proven = engines.replicas.have_settled_for
        next_turn_prefill = await stack.enter_async_context(
            NextTurnPrefill(usage, quotas, SpeculativePrefillMetrics(metrics.registry), clock)
        )
        authenticator = await stack.enter_async_context(Authenticator(keys, pepper, clock, turn=turn))
        classes, prices, adapters = (
            ClassCache(database, clock),
            PriceCache(database, clock),
            AdapterCache(database, clock),
        )
        door = await stack.enter_async_context(OidcAuthentication(settings, database, clock))
        retention = await _start_retention(
            stack, settings, process_id, database, objects, RetentionMetrics(metrics.registry)
        )
        told = ReloadMetrics(metrics.registry)
        reloader = None if source.path is None else Reloader(source, live, told, beside=key_files)
        administration = Administration(
            settings, database, looked_at, objects, (pepper, turn), clock, adapters, engines.replicas
        )
        await stack.enter_async_context(administration)
        telemetry.send_metrics(settings)
        parts = (looked_at, authenticator, classes, prices, quotas, pepper, clock)
        more = administration.routes(traces, source, live, reloader)
        admin = admin_router(*parts, oidc=door.find, traces=traces, set_aside=usage.set_aside, more=more)
        batches = Batches(
            process_id, database, objects, authenticator, quotas, metrics, telemetry.tracing, clock, settings
        )
        live.follow_with(["engines", "external_engine_api_key"], engines.follow, reads_files=True)
        telemetry.followed_by(live)
        door.followed_by(live)
        administration.followed_by(live)
        live.follow(["metrics_tenants"], lambda wanted: metrics.tenants.use(wanted.metrics_tenants))
        live.follow(
            OF_RETENTION,
            lambda wanted: retention.use(retention_jobs_of(wanted, database, objects), wanted.retention_interval_s),
        )
        yield Services(
            authenticator=authenticator,
            usage=usage,
            replicas=engines.replicas,
            classes=classes,
            prices=prices,
            metrics=metrics,
            tracing=telemetry.tracing,
            clock=clock,
            recorder=recorder,
            idempotency=idempotency,
            responses=responses,
            admin_routes=[admin],
            store=store,
            objects=objects_ready,
            batches=batches,
            adapters=adapters,
            live=live,
            reloader=reloader,
            next_turn_prefill=next_turn_prefill,
        )


def _open_stores(
    stack: AsyncExitStack, settings: GatewaySettings
) -> tuple[Database, Database, Database, Database | None]:
    """Open the databases, which the stack closes.

    Return the store for requests, the same store for read-only use and for look-ups of keys, and the trace store, if it
    is another one.
    """
    url = settings.store_url
    database, looked_at, keys = (Database.open(url, pool=pool) for pool in (SERVING, LOOKING, CHECKING))
    traces = Database.open(settings.traces_url, pool=LOOKING) if settings.traces_url != url else None
    for opened in (database, looked_at, keys, traces):
        if opened is not None:
            stack.push_async_callback(opened.close)
    return database, looked_at, keys, traces


def _open_objects(
    stack: AsyncExitStack, settings: GatewaySettings, database: Database
) -> tuple[StoreReadiness, ObjectStore, ObjectStoreReadiness]:
    """Open the object store and the checks of both stores, which the stack closes. Raises Unavailable."""
    objects = ObjectStore.open(settings.objects_url)
    stack.push_async_callback(objects.close)
    store, objects_ready = StoreReadiness(database), ObjectStoreReadiness(database, objects)
    stack.push_async_callback(store.close)
    stack.push_async_callback(objects_ready.close)
    return store, objects, objects_ready


async def _start_idempotency(stack: AsyncExitStack, settings: GatewaySettings, database: Database) -> IdempotencyKeys:
    """Start the store of responses under their Idempotency-Key, until the stack is closed."""
    keeper = IdempotencyKeys(database, KeyStore(), KeepingLimits.of(settings))
    await keeper.start()
    stack.push_async_callback(keeper.stop)
    return keeper


async def _start_retention(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    process_id: str,
    database: Database,
    objects: ObjectStore,
    metrics: RetentionMetrics,
) -> RetentionService:
    """Start the deletion of expired rows, until the stack is closed."""
    jobs = retention_jobs_of(settings, database, objects)
    retention = RetentionService(process_id, database, jobs, metrics, interval_s=settings.retention_interval_s)
    await retention.start()
    stack.push_async_callback(retention.stop)
    return retention
