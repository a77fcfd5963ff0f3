"""The composition root of a gateway: opens its services in order, connects them, and closes them in reverse order.

The gateway process and the tests call `assembled`. Listeners, signals and logging belong to the caller.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from litestar import Litestar
from litestar.types import ControllerRouterHandler

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.administration.router import admin_router
from moiety_platform.agent_runs.service import AgentRuns
from moiety_platform.app import Services, create_app, create_operations_app, create_pipeline
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.pepper import pepper_of, pepper_rotation_of
from moiety_platform.backoff import Backoff
from moiety_platform.batches.assembly import Batches
from moiety_platform.batches.worker import POLL_S
from moiety_platform.bootstrap.administration import Administration
from moiety_platform.bootstrap.document_preparation import document_preparation_of
from moiety_platform.bootstrap.engine_waker import OpenScaler, open_scaler
from moiety_platform.bootstrap.engines import Engines, key_files
from moiety_platform.bootstrap.image_preparation import link_fetcher_of
from moiety_platform.bootstrap.oidc_authentication import OidcAuthentication
from moiety_platform.bootstrap.server import GatewayServer
from moiety_platform.bootstrap.telemetry import Telemetry
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import Clock, SystemClock
from moiety_platform.connections import ConnectionLimits
from moiety_platform.db.now import now_ms
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import CHECKING, REPORTING, SERVING, Database
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.engine_client.base import EngineClient
from moiety_platform.files.prompt_files import UploadedPromptFiles
from moiety_platform.files.store import Now
from moiety_platform.idempotency.key_store_client import IdempotencyKeys
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.idempotency.store import KeyStore
from moiety_platform.inference.guardrail_checks import GuardrailChecks
from moiety_platform.inference.image_preparation import ImagePreparation
from moiety_platform.inference.request_recorder import RequestRecorder, UsageSink
from moiety_platform.inference.shadow_traffic import ShadowTraffic
from moiety_platform.jwt_issuers.jwt_authenticator import JwtAuthenticator
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import set_log_level
from moiety_platform.machine_limits import MachineCollector, MachineLimits
from moiety_platform.metrics import Metrics
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import LEASE_S, QuotaEnforcer
from moiety_platform.quota.store import LeaseStore
from moiety_platform.quotes.quote import QuoteSigner
from moiety_platform.receipts.service import Receipts
from moiety_platform.receipts.signing import FILE_NAME, load_signer
from moiety_platform.reloading.reloader import Reloader, ReloadMetrics
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_contents.writer import ContentWriter
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.responses_api.background import BackgroundRuns
from moiety_platform.responses_api.conversation_locks import ConversationLocks
from moiety_platform.responses_api.conversation_service import ConversationService
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.retention.jobs import retention_jobs_of
from moiety_platform.retention.metrics import RetentionMetrics
from moiety_platform.retention.service import RetentionService
from moiety_platform.settings import GatewaySettings
from moiety_platform.speculative_prefill.metrics import SpeculativePrefillMetrics
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill
from moiety_platform.spot.service import SpotMetrics, SpotPrices
from moiety_platform.store_metrics import StoreCollector
from moiety_platform.trace_metrics import TraceCollector
from moiety_platform.traces.tracing import Sender
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder
from moiety_platform.wake_on_request.metrics import WakeCollector
from moiety_platform.wake_on_request.waker import EngineWaker
from moiety_wire.shared_fields import copy_fields

LAST_RECORDS_S = 10.0
OPERATIONS_DRAIN_S = 1  # wait of a shutdown for a running scrape
RETENTION_SETTINGS = (
    "retention_interval_s", "keep_files_days", "keep_batches_days", "keep_requests_days", "keep_limit_windows_days",
    "usage_export_format", "usage_export_days",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Parts that a caller brings in place of what the settings and the machine give, such as clocks and engines."""

    clock: Clock = field(default_factory=SystemClock)
    breaker_clock: Clock | None = None  # of the engines' circuit breakers; None: `clock`
    now: Now = now_ms  # the database's clock
    engines: Sequence[EngineClient] = ()  # beside those of the settings
    span_senders: Sequence[Sender] = ()  # beside those of the settings
    usage: UsageSink | None = None  # takes the usage rows of requests instead of the store
    database: Database | None = None  # an open store for all uses, which the caller closes
    batch_poll_s: float = POLL_S
    batch_backoff: Backoff = field(default_factory=Backoff)
    admin_routes: Sequence[ControllerRouterHandler] = ()  # beside our own
    open_scaler: OpenScaler = open_scaler  # of the StatefulSets of `scaled_models`


@dataclass(frozen=True, slots=True)
class _OpenParts:
    services: Services
    database: Database
    objects: ObjectStore
    stored_usage: UsageRecorder
    retention: RetentionService
    live: LiveSettings[GatewaySettings]
    batches: Batches


@dataclass(frozen=True, slots=True)
class AssembledGateway(_OpenParts):
    """A gateway without listeners: its services, its application and its server.

    `make_operations` makes the server of the operations pages, which only a listener of their own needs.
    """

    app: Litestar
    server: GatewayServer
    make_operations: Callable[[], GatewayServer]


@asynccontextmanager
async def assembled(
    source: SettingsSource[GatewaySettings],
    overrides: Overrides | None = None,
    *,
    on_started: Callable[[], None] = lambda: None,
) -> AsyncIterator[AssembledGateway]:
    """Open a gateway except for its listeners; `on_started` is called once its server accepts connections.

    Asserts that every live setting has a follower. Raises CannotUseEngine or CannotSendSpans.
    """
    settings = source.first
    async with AsyncExitStack() as stack:
        parts = await _open_services(stack, source, overrides or Overrides())
        services, live, batches = parts.services, parts.live, parts.batches
        pipeline = create_pipeline(settings, services)
        app = create_app(settings, services, pipeline)
        limits = ConnectionLimits.of(settings)

        def drain() -> None:
            batches.drain()
            services.background.drain()

        server = GatewayServer(app, settings.drain_s, limits, on_started, on_draining=drain)
        server.followed_by(live)
        live.follow(["drain_s"], services.background.use)

        def make_operations() -> GatewayServer:
            operations = create_operations_app(services, app, lambda: live.now, lambda: server.should_exit)
            return GatewayServer(operations, OPERATIONS_DRAIN_S, limits)

        live.follow(["log_level"], lambda settings: set_log_level(settings.log_level))
        assert not live.unfollowed, live.unfollowed
        await stack.enter_async_context(batches.working(pipeline))
        yield copy_fields(parts, AssembledGateway, app=app, server=server, make_operations=make_operations)


async def _open_services(
    stack: AsyncExitStack, source: SettingsSource[GatewaySettings], overrides: Overrides
) -> _OpenParts:
    """Open everything that the application needs. The stack closes it in reverse order, so that no row is lost."""
    settings, clock = source.first, overrides.clock
    metrics, live = Metrics(settings.metrics_tenants), LiveSettings(settings)
    pepper, turn = pepper_of(settings), pepper_rotation_of(settings)
    process_id = f"{socket.gethostname()[:24]}-{secrets.token_hex(12)}"
    telemetry = Telemetry(settings, metrics.registry, process_id, overrides.span_senders)
    stack.push_async_callback(telemetry.close)
    metrics.registry.register(TraceCollector(telemetry.tracing))
    database, report_database, keys, traces = _open_stores(stack, settings, overrides.database)
    metrics.watch_statements(lambda: sum(counted.num_statements for counted in {database, report_database, keys}))
    store, objects, objects_ready = _open_objects(stack, settings, database)
    usage, stored_usage, quotas = await _start_accounting(stack, settings, process_id, database, overrides)
    idempotency = await _start_idempotency(stack, settings, database, overrides)
    responses = ResponseService(database, ConversationLimits.of(settings), ResponseStore(overrides.now))
    content_writer = _start_contents(stack, database, ContentCipher(pepper, turn), overrides)
    recorder = RequestRecorder(usage, quotas, metrics, telemetry.tracing, clock, content_writer)
    _start_recorder(stack, settings, live, recorder)
    machine = await _start_machine_limits(stack, settings, metrics)
    meter = await _start_meter(stack, database, stored_usage)
    metrics.registry.register(StoreCollector(clock, store, stored_usage, quotas, meter, recorder))
    contents = AdapterContents(database, objects)
    engines = await _connect_engines(stack, settings, live, overrides, quotas, meter, contents)
    next_turn_prefill = await stack.enter_async_context(
        NextTurnPrefill(usage, quotas, SpeculativePrefillMetrics(metrics.registry), clock)
    )
    authenticator = await stack.enter_async_context(Authenticator(keys, pepper, clock, turn=turn))
    classes, rules = ClassCache(database, clock), RequestRulesCache(database, clock)
    adapters = AdapterCache(database, clock)
    oidc = await stack.enter_async_context(OidcAuthentication(settings, database, clock))
    retention = await _start_retention(stack, live, settings, process_id, database, objects, metrics, overrides.now)
    reload_metrics = ReloadMetrics(metrics.registry)
    reloader = None if source.path is None else Reloader(source, live, reload_metrics, beside=key_files)
    texts = DocumentTextCache(settings.document_cache_bytes)
    administration = Administration(
        settings, database, report_database, objects, (pepper, turn), clock, adapters, engines.replicas, texts
    )
    await stack.enter_async_context(administration)
    jwts = JwtAuthenticator(keys, clock, authenticator, administration.reach)
    authenticator.jwts = await stack.enter_async_context(jwts)
    telemetry.send_metrics(settings)
    admin = admin_router(
        report_database, authenticator, classes, rules, quotas, pepper, clock,
        oidc=oidc.find, traces=traces, quarantined_usage=stored_usage.quarantined_usage,
        more=[*administration.routes(traces, source, live, reloader), *overrides.admin_routes],
    )  # fmt: skip
    batches = Batches(
        process_id, database, objects, authenticator, quotas, metrics, telemetry.tracing, clock, settings,
        poll_s=overrides.batch_poll_s, backoff=overrides.batch_backoff, now=overrides.now,
    )  # fmt: skip
    uploaded = UploadedPromptFiles(batches.files)
    fetcher = await stack.enter_async_context(link_fetcher_of(settings, live))
    documents = document_preparation_of(settings, live, uploaded, texts, metrics.registry, fetcher)
    stack.push_async_callback(documents.close)
    guardrails = await stack.enter_async_context(GuardrailChecks(metrics, administration.reach))
    shadow = ShadowTraffic(recorder, engines.replicas, metrics)
    stack.push_async_callback(shadow.close)
    for follower in (telemetry, oidc, administration):
        follower.followed_by(live)
    live.follow(["metrics_tenants"], lambda settings: metrics.tenants.use(settings.metrics_tenants))
    services = Services(
        authenticator=authenticator,
        usage=usage,
        replicas=engines.replicas,
        classes=classes,
        rules=rules,
        metrics=metrics,
        tracing=telemetry.tracing,
        clock=clock,
        recorder=recorder,
        idempotency=idempotency,
        responses=responses,
        conversations=ConversationService(database, responses, ConversationStore(overrides.now)),
        cipher=ReasoningCipher(pepper, turn),
        background=await stack.enter_async_context(_background_runs(responses, database, overrides, settings)),
        admin_routes=[admin],
        store=store,
        objects=objects_ready,
        machine=machine,
        batches=batches,
        adapters=adapters,
        live=live,
        reloader=reloader,
        next_turn_prefill=next_turn_prefill,
        images=ImagePreparation(fetcher, uploaded.read_all),
        documents=documents,
        quotes=QuoteSigner(pepper, turn),
        shadow=shadow,
        guardrails=guardrails,
        runs=await stack.enter_async_context(AgentRuns(database, quotas, clock)),
        spot=_spot_prices(database, engines, metrics, settings, overrides),
        receipts=_receipts(settings, database, clock, stored_usage),
        waker=await _start_waker(stack, settings, live, process_id, database, overrides, engines, metrics),
    )
    return _OpenParts(services, database, objects, stored_usage, retention, live, batches)


def _spot_prices(
    database: Database, engines: Engines, metrics: Metrics, settings: GatewaySettings, overrides: Overrides
) -> SpotPrices:
    """Return the prices of spot classes, by the load of these engines."""
    spot_metrics = SpotMetrics(metrics.registry)
    states = engines.replicas.states
    return SpotPrices(database, states, overrides.clock, spot_metrics, settings.spot_interval_s, overrides.now)


def _receipts(settings: GatewaySettings, database: Database, clock: Clock, usage: UsageRecorder) -> Receipts:
    """Return the receipts of requests, signed with the keys of the settings' file. Raises BadReceiptKey."""
    signer = load_signer(settings.receipt_key_file or settings.data_dir / FILE_NAME)
    return Receipts(database, signer, clock, usage.holds, usage.flush)


def _start_contents(
    stack: AsyncExitStack, database: Database, cipher: ContentCipher, overrides: Overrides
) -> ContentWriter:
    """Start the writer of contents of requests, until the stack is closed."""
    writer = ContentWriter(database, cipher, now=overrides.now)
    writer.start()
    stack.push_async_callback(writer.stop)
    return writer


def _start_recorder(
    stack: AsyncExitStack, settings: GatewaySettings, live: LiveSettings[GatewaySettings], recorder: RequestRecorder
) -> None:
    """Let the recorder follow its setting, and finish its records before the stack closes what they need."""
    recorder.use(settings)
    live.follow(["access_log_rate"], recorder.use)
    stack.push_async_callback(recorder.wait_idle, LAST_RECORDS_S)


async def _connect_engines(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    overrides: Overrides,
    quotas: QuotaEnforcer,
    meter: MeterReader,
    contents: AdapterContents,
) -> Engines:
    """Connect to the engines of the settings, until the stack is closed, and follow their changes."""
    engines = Engines(
        settings, overrides.clock, quotas.replica_id, meter, contents,
        more=overrides.engines, breaker_clock=overrides.breaker_clock,
    )  # fmt: skip
    await stack.enter_async_context(engines)
    quotas.quarantine.is_proven = engines.replicas.have_settled_for
    live.follow_with(["engines", "external_engine_api_key"], engines.follow, reads_files=True)
    return engines


async def _start_waker(
    stack: AsyncExitStack,
    settings: GatewaySettings,
    live: LiveSettings[GatewaySettings],
    process_id: str,
    database: Database,
    overrides: Overrides,
    engines: Engines,
    metrics: Metrics,
) -> EngineWaker:
    """Start the waker of sleeping engines, until the stack is closed. Raises CannotApplySetting."""
    waker = EngineWaker(process_id, database, engines.replicas, overrides.clock, settings, overrides.open_scaler)
    metrics.registry.register(WakeCollector(waker))
    waker.followed_by(live)
    await waker.start()
    stack.push_async_callback(waker.stop)
    return waker


def _background_runs(
    responses: ResponseService, database: Database, overrides: Overrides, settings: GatewaySettings
) -> BackgroundRuns:
    return BackgroundRuns(responses, ConversationLocks(database, ConversationStore(overrides.now)), settings.drain_s)


async def _start_idempotency(
    stack: AsyncExitStack, settings: GatewaySettings, database: Database, overrides: Overrides
) -> IdempotencyKeys:
    """Start the store of idempotency keys, until the stack is closed."""
    keys = IdempotencyKeys(database, KeyStore(now=overrides.now), AnswerStorageLimits.of(settings))
    await keys.start()
    stack.push_async_callback(keys.stop)
    return keys


async def _start_machine_limits(stack: AsyncExitStack, settings: GatewaySettings, metrics: Metrics) -> MachineLimits:
    """Start the watch over disk space and open files, until the stack is closed."""
    metrics.registry.register(MachineCollector(settings.data_dir, settings.supervisor_status))
    machine = MachineLimits(settings.data_dir)
    await machine.start()
    stack.push_async_callback(machine.stop)
    return machine


async def _start_meter(stack: AsyncExitStack, database: Database, stored_usage: UsageRecorder) -> MeterReader:
    """Start the reader of metered tokens, until the stack is closed."""
    meter = MeterReader(database, stored_usage.holds)
    await meter.start()
    stack.push_async_callback(meter.stop)
    return meter


async def _start_accounting(
    stack: AsyncExitStack, settings: GatewaySettings, process_id: str, database: Database, overrides: Overrides
) -> tuple[UsageSink, UsageRecorder, QuotaEnforcer]:
    """Start the recorder of usage and the enforcer of quotas, until the stack is closed.

    Return the sink of usage rows, the recorder, which is the sink unless it is overridden, and the enforcer.
    """
    stored_usage = UsageRecorder(database, settings.usage_journal_dir)
    await stored_usage.start()
    stack.push_async_callback(stored_usage.stop)
    quotas = QuotaEnforcer(database, LeaseStore(process_id, LEASE_S), overrides.clock, ttl_s=LEASE_S)
    await quotas.start()
    stack.push_async_callback(quotas.stop)
    return stored_usage if overrides.usage is None else overrides.usage, stored_usage, quotas


def _open_stores(
    stack: AsyncExitStack, settings: GatewaySettings, opened: Database | None
) -> tuple[Database, Database, Database, Database | None]:
    """Open the databases, which the stack closes; an `opened` store serves all uses and stays open.

    Return the store for requests, the same store for read-only use and for look-ups of keys, and the trace store, if it
    is another one.
    """
    if opened is not None:
        return opened, opened, opened, None
    url = settings.store_url
    database, report_database, keys = (Database.open(url, pool=pool) for pool in (SERVING, REPORTING, CHECKING))
    traces = Database.open(settings.traces_url, pool=REPORTING) if settings.traces_url != url else None
    for store in (database, report_database, keys, traces):
        if store is not None:
            stack.push_async_callback(store.close)
    return database, report_database, keys, traces


def _open_objects(
    stack: AsyncExitStack, settings: GatewaySettings, database: Database
) -> tuple[StoreReadiness, ObjectStore, ObjectStoreReadiness]:
    """Open the object store and the checks of both stores, which the stack closes. Raises Unavailable."""
    objects = ObjectStore.open(settings.objects_url)
    stack.push_async_callback(objects.close)
    store, objects_ready = (
        StoreReadiness(database),
        ObjectStoreReadiness(database, objects, is_own=settings.has_embedded_stores),
    )
    stack.push_async_callback(store.close)
    stack.push_async_callback(objects_ready.close)
    return store, objects, objects_ready


async def _start_retention(
    stack: AsyncExitStack,
    live: LiveSettings[GatewaySettings],
    settings: GatewaySettings,
    process_id: str,
    database: Database,
    objects: ObjectStore,
    metrics: Metrics,
    now: Now,
) -> RetentionService:
    """Start the deletion of expired rows, which follows the settings, until the stack is closed."""
    jobs = retention_jobs_of(settings, database, objects, now)
    interval_s = settings.retention_interval_s
    retention_metrics = RetentionMetrics(metrics.registry)
    retention = RetentionService(process_id, database, jobs, retention_metrics, interval_s=interval_s, now=now)
    live.follow(
        RETENTION_SETTINGS,
        lambda settings: retention.use(
            retention_jobs_of(settings, database, objects, now), settings.retention_interval_s
        ),
    )
    await retention.start()
    stack.push_async_callback(retention.stop)
    return retention
