"""The gateway process: opens what it needs, serves HTTP until a signal, drains, and closes everything in order."""

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
from ipaddress import ip_network

import httpx
import structlog
import uvicorn
import uvloop
import zmq
from litestar import Litestar
from litestar.handlers import HTTPRouteHandler

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.adapters.controller import adapter_routes
from moiety_platform.app import Services, create_app, create_pipeline
from moiety_platform.auth.admin import admin_router
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.oidc import FETCH_TIMEOUT_S, OidcTerms, OidcVerifier
from moiety_platform.auth.pepper import resolve_pepper
from moiety_platform.batches.assembly import Batches
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import SystemClock
from moiety_platform.completions.recorder import RequestRecorder
from moiety_platform.connections import ConnectionLimits, ServerConfig
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import LOOKING, Database
from moiety_platform.engine_addresses import ForeignAddress, is_foreign, is_name
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.engine_client.curve import CurveKeys
from moiety_platform.engine_client.foreign.client import ForeignEngineClient
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.erasure.controller import erasure_routes
from moiety_platform.experts.controller import expert_routes
from moiety_platform.experts.service import ExpertService
from moiety_platform.foresight.foreseer import Foreseer
from moiety_platform.idempotency.keeper import IdempotencyKeeper, KeepingLimits
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.listening import BACKLOG, bind
from moiety_platform.logs import configure_logging
from moiety_platform.metrics import ForesightMetrics, Metrics, UpkeepMetrics
from moiety_platform.prices.cache import PriceCache
from moiety_platform.quota.keeper import LEASE_S, QuotaKeeper
from moiety_platform.quota.store import LeaseStore
from moiety_platform.responses_api.keeper import ConversationLimits, ResponseKeeper
from moiety_platform.routing.controller import engine_routes
from moiety_platform.routing.discovery import DnsWatch
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import GatewaySettings
from moiety_platform.simulations.controller import simulation_routes
from moiety_platform.simulations.runner import Simulations
from moiety_platform.store_metrics import StoreCollector
from moiety_platform.trace_metrics import TraceCollector
from moiety_platform.traces.sampling import SamplingTerms
from moiety_platform.traces.tracing import Tracing
from moiety_platform.upkeep.chores import chores_of
from moiety_platform.upkeep.service import Upkeep
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.webhooks.addresses import Reach
from moiety_platform.webhooks.controller import webhook_routes
from moiety_platform.webhooks.poster import Poster
from moiety_platform.webhooks.sender import AlertSender
from moiety_text.errors import TextError

LAST_RECORDS_S = 10.0
M_ARENA_MAX, ARENAS = -8, 2  # of malloc.h
RARELY = (20_000, 50, 100)  # a request leaves little in cycles, so looking for them at every few is time lost

log = structlog.get_logger(__name__)


class CannotSendSpans(Exception):
    """A package that the way of the spans needs is not installed; the message says which."""


class CannotUseEngine(Exception):
    """A file that the address of an engine names is missing or unusable; the message says which."""


def run_gateway(settings: GatewaySettings) -> None:
    """Serve until SIGINT or SIGTERM; a second one ends without draining. Raises CannotListen,
    CannotUseEngine or CannotSendSpans."""
    configure_logging(settings.log_level, settings.log_format)
    _share_arenas()
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # for texts in batches, and here they come one by one
    listener = bind(settings.host, settings.port)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(settings, listener))


def _share_arenas() -> None:
    """Let threads allocate from few arenas. By itself glibc gives each of the database's an arena of its own, and what
    was once needed in it is never given back. Elsewhere nothing is changed."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)


async def _serve(settings: GatewaySettings, listener: socket.socket) -> None:
    async with build_services(settings) as services:
        pipeline = create_pipeline(settings, services)
        app = create_app(settings, services, pipeline)
        assert services.batches is not None, "a gateway with a store has batches"
        server = GatewayServer(app, settings.drain_s, ConnectionLimits.of(settings), on_draining=services.batches.drain)
        loop = asyncio.get_running_loop()
        for signal_number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signal_number, server.request_exit)
        host, port = listener.getsockname()[:2]
        gc.collect()
        gc.set_threshold(*RARELY)
        gc.freeze()  # what lives as long as the process need not be looked at by every collection
        log.info("gateway_listening", host=host, port=port, engines=list(settings.engines))
        async with services.batches.working(pipeline):
            await server.serve([listener])
        log.info("gateway_stopped")


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
        super().__init__(
            ServerConfig(
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
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_exit(self) -> None:
        """Drain; asked again, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        self._on_draining()


@asynccontextmanager
async def build_services(settings: GatewaySettings) -> AsyncIterator[Services]:
    """Open everything that the application needs; close it again in reverse, so that no usage row is lost."""
    clock, metrics = SystemClock(), Metrics(settings.metrics_tenants)
    pepper = resolve_pepper(settings.key_pepper.get_secret_value() if settings.key_pepper else None, settings.data_dir)
    async with AsyncExitStack() as stack:
        process_id = f"{socket.gethostname()[:24]}-{secrets.token_hex(12)}"
        tracing = _trace(settings, process_id)
        stack.push_async_callback(asyncio.to_thread, tracing.close)
        metrics.registry.register(TraceCollector(tracing))
        database, looked_at, traces = _open_stores(stack, settings)
        metrics.watch_statements(lambda: database.num_statements + looked_at.num_statements)
        store = StoreReadiness(database)
        stack.push_async_callback(store.close)
        usage = UsageRecorder(database, settings.data_dir / "usage-journal")
        await usage.start()
        stack.push_async_callback(usage.stop)
        quotas = QuotaKeeper(database, LeaseStore(process_id, LEASE_S), clock, ttl_s=LEASE_S)
        await quotas.start()
        stack.push_async_callback(quotas.stop)
        idempotency = IdempotencyKeeper(database, KeyStore(), KeepingLimits.of(settings))
        await idempotency.start()
        stack.push_async_callback(idempotency.stop)
        responses = ResponseKeeper(database, ConversationLimits.of(settings))
        recorder = RequestRecorder(usage, quotas, metrics, tracing, clock)
        stack.push_async_callback(recorder.wait_idle, LAST_RECORDS_S)
        meter = MeterReader(database, usage.holds)
        await meter.start()
        stack.push_async_callback(meter.stop)
        metrics.registry.register(StoreCollector(clock, store, usage, quotas, meter, recorder))
        replicas = await stack.enter_async_context(
            _connect(settings, clock, quotas.replica_id, meter, AdapterContents(database))
        )
        quotas.quarantine.is_proven = replicas.have_settled_for
        foreseer = Foreseer(usage, quotas, ForesightMetrics(metrics.registry), clock)
        stack.push_async_callback(foreseer.stop)
        authenticator = Authenticator(database, pepper, clock)
        classes, prices, adapters = (
            ClassCache(database, clock),
            PriceCache(database, clock),
            AdapterCache(database, clock),
        )
        oidc = await stack.enter_async_context(_verify_tokens(settings, database, clock))
        reach = Reach(tuple(map(ip_network, settings.webhook_networks)))
        poster = await stack.enter_async_context(Poster(reach))
        alerts = AlertSender(database, poster, pepper, clock)
        await alerts.start()
        stack.push_async_callback(alerts.stop)
        await stack.enter_async_context(_keep_up(settings, process_id, database, UpkeepMetrics(metrics.registry)))
        _send_metrics(stack, settings, metrics, process_id)
        simulations = simulation_routes(_simulate(stack, settings, looked_at), replicas.states)
        more = [*engine_routes(replicas), *expert_routes(ExpertService(replicas, clock)), *simulations]
        more += [*webhook_routes(reach, pepper), *erasure_routes(traces=traces), *_adapter_routes(adapters, settings)]
        parts = (looked_at, authenticator, classes, prices, quotas, pepper, clock)
        admin = admin_router(*parts, oidc=oidc, traces=traces, more=more)
        yield Services(
            authenticator=authenticator,
            usage=usage,
            replicas=replicas,
            classes=classes,
            prices=prices,
            metrics=metrics,
            tracing=tracing,
            clock=clock,
            recorder=recorder,
            idempotency=idempotency,
            responses=responses,
            admin_routes=[admin],
            store=store,
            batches=Batches(process_id, database, authenticator, quotas, metrics, tracing, clock, settings),
            adapters=adapters,
            foreseer=foreseer,
        )


def _open_stores(stack: AsyncExitStack, settings: GatewaySettings) -> tuple[Database, Database, Database | None]:
    """The store for those who are served, the same for those who look, and that of traces where it is another; until
    the stack is closed."""
    database, looked_at = Database.open(settings.store_url), Database.open(settings.store_url, pool=LOOKING)
    apart = settings.traces_url != settings.store_url
    traces = Database.open(settings.traces_url, pool=LOOKING) if apart else None
    for opened in (database, looked_at, traces):
        if opened is not None:
            stack.push_async_callback(opened.close)
    return database, looked_at, traces


def _adapter_routes(adapters: AdapterCache, settings: GatewaySettings) -> list[HTTPRouteHandler]:
    one, all_of_a_tenant = settings.max_adapter_bytes, settings.max_adapter_bytes_per_tenant
    return adapter_routes(adapters, max_bytes=one, max_tenant_bytes=all_of_a_tenant)


def _simulate(stack: AsyncExitStack, settings: GatewaySettings, database: Database) -> Simulations:
    """What runs simulations, until the stack is closed."""
    made = Simulations(database, limit_s=settings.simulation_limit_s, niceness=settings.simulation_niceness)
    stack.push_async_callback(made.stop)
    return made


def _trace(settings: GatewaySettings, process_id: str) -> Tracing:
    """What judges traces, and sends those that are kept to where the settings say."""
    terms = SamplingTerms(
        settings.trace_sample_rate, settings.trace_sample_rates, settings.trace_first_per_s, settings.trace_max_per_s
    )
    token = settings.traces_token.get_secret_value() if settings.traces_token else None
    if settings.traces_endpoint is None and settings.otlp_endpoint is None:
        return Tracing(terms)
    from moiety_platform.traces.sender import SpanSender, grpc_exporter, otlp_exporter  # noqa: PLC0415  # slow to import

    senders = []
    if settings.traces_endpoint is not None:
        senders.append(SpanSender("store", otlp_exporter(settings.traces_endpoint, token), process_id))
    if settings.otlp_endpoint is not None:
        make = grpc_exporter if settings.otlp_protocol == "grpc" else otlp_exporter
        try:
            senders.append(SpanSender("otlp", make(settings.otlp_endpoint), process_id))
        except ModuleNotFoundError as exc:
            raise CannotSendSpans(f"OTLP by gRPC needs {exc.name}: pip install 'moiety[grpc]'") from exc
    return Tracing(terms, senders)


def _send_metrics(stack: AsyncExitStack, settings: GatewaySettings, metrics: Metrics, process_id: str) -> None:
    """By OTLP, where the settings say so, for as long as the stack is open."""
    if settings.otlp_metrics_endpoint is None:
        return
    from moiety_platform.otlp_metrics import MetricSender, otlp_metric_exporter  # noqa: PLC0415  # slow to import

    exporter, interval_s = (
        otlp_metric_exporter(settings.otlp_metrics_endpoint),
        settings.otlp_metrics_interval_ms / 1000,
    )
    sender = MetricSender(metrics.registry, exporter, process_id, interval_s=interval_s)
    stack.push_async_callback(asyncio.to_thread, sender.close)


@asynccontextmanager
async def _keep_up(
    settings: GatewaySettings, process_id: str, database: Database, metrics: UpkeepMetrics
) -> AsyncIterator[None]:
    """Delete what is past its time for as long as the context is open."""
    chores = chores_of(settings, database)
    upkeep = Upkeep(process_id, database, chores, metrics, interval_s=settings.upkeep_interval_s)
    await upkeep.start()
    try:
        yield
    finally:
        await upkeep.stop()


@asynccontextmanager
async def _verify_tokens(
    settings: GatewaySettings, database: Database, clock: SystemClock
) -> AsyncIterator[OidcVerifier | None]:
    """What checks the tokens of the settings' issuer; None where there is none."""
    if settings.oidc_issuer is None or settings.oidc_audience is None:
        yield None
        return
    terms = OidcTerms(
        settings.oidc_issuer, settings.oidc_audience, settings.oidc_roles_claim, settings.oidc_tenant_claim
    )
    async with httpx.AsyncClient(timeout=FETCH_TIMEOUT_S) as http:
        yield OidcVerifier(terms, database, http, clock)


@asynccontextmanager
async def _connect(
    settings: GatewaySettings, clock: SystemClock, replica_id: str, meter: MeterReader, adapters: AdapterContents
) -> AsyncIterator[Replicas]:
    """Links to all engines of the settings, and to those that their names stand for."""
    curve = None
    if settings.curve_server_key and settings.curve_public_key and settings.curve_secret_key:
        curve = CurveKeys(
            settings.curve_server_key.encode(),
            settings.curve_public_key.encode(),
            settings.curve_secret_key.get_secret_value().encode(),
        )
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def client_of(address: str) -> EngineClient:
        if is_foreign(address):
            return _foreign_client(ForeignAddress.parse(address), settings, clock)
        return ZmqEngineClient(
            address, context, clock, curve, replica_id=replica_id, on_unsettled=meter.take, adapters=adapters.parts
        )

    names = [address for address in settings.engines if is_name(address)]
    try:
        async with Replicas([client_of(address) for address in settings.engines if address not in names]) as links:
            watches = [DnsWatch(name, links, client_of) for name in names]
            try:
                for watch in watches:
                    await watch.start()
                yield links
            finally:
                for watch in watches:
                    await watch.stop()
    finally:
        context.destroy(linger=0)


def _foreign_client(address: ForeignAddress, settings: GatewaySettings, clock: SystemClock) -> ForeignEngineClient:
    """Raises CannotUseEngine where its files cannot be read."""
    key = settings.foreign_api_key.get_secret_value() if settings.foreign_api_key else None
    try:
        if address.key_file is not None:
            key = address.key_file.read_text(encoding="utf-8").strip()
        return ForeignEngineClient(address, clock, key)
    except (TextError, OSError, UnicodeDecodeError) as exc:
        raise CannotUseEngine(f"engine {address.name}: {exc}") from exc
