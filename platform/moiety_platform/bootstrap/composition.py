"""The composition root of a gateway: opens its services in order, connects them, and closes them in reverse order.

The gateway process and the tests call `assembled`. Listeners, signals and logging belong to the caller.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from litestar import Litestar

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.adapters.contents import AdapterContents
from moiety_platform.administration.router import admin_router
from moiety_platform.agent_runs.service import AgentRuns
from moiety_platform.app import Services, create_app, create_operations_app, create_pipeline
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.pepper import pepper_of, pepper_rotation_of
from moiety_platform.batches.assembly import Batches
from moiety_platform.bootstrap.administration import Administration
from moiety_platform.bootstrap.encoding_cache import open_encoding_cache
from moiety_platform.bootstrap.engines import Engines
from moiety_platform.bootstrap.oidc_authentication import OidcAuthentication, limit_keys_by_roles
from moiety_platform.bootstrap.overrides import Overrides
from moiety_platform.bootstrap.request_services import (
    background_runs_of,
    open_files,
    open_shadow_traffic,
    receipts_of,
    reloader_of,
    spot_prices_of,
    start_contents,
    start_machine_limits,
    start_next_turn_prefill,
    start_recorder,
    start_waker,
)
from moiety_platform.bootstrap.server import GatewayServer
from moiety_platform.bootstrap.stores import (
    open_objects,
    open_stores,
    start_accounting,
    start_idempotency,
    start_meter,
    start_retention,
)
from moiety_platform.bootstrap.telemetry import Telemetry
from moiety_platform.classes.cache import ClassCache
from moiety_platform.connections import ConnectionLimits
from moiety_platform.db.session import Database
from moiety_platform.document_extraction.text_cache import DocumentTextCache
from moiety_platform.inference.guardrail_checks import GuardrailChecks
from moiety_platform.inference.request_recorder import RequestRecorder
from moiety_platform.jwt_issuers.jwt_authenticator import JwtAuthenticator
from moiety_platform.live_settings import LiveSettings
from moiety_platform.logs import set_log_level
from moiety_platform.metrics import Metrics
from moiety_platform.object_storage.store import ObjectStore
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quotes.quote import QuoteSigner
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.request_contents.cipher import ContentCipher
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.responses_api.conversation_service import ConversationService
from moiety_platform.responses_api.conversation_store import ConversationStore
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.store import ResponseStore
from moiety_platform.retention.service import RetentionService
from moiety_platform.settings import GatewaySettings
from moiety_platform.store_metrics import StoreCollector
from moiety_platform.trace_metrics import trace_families
from moiety_platform.usage.metering import MeterReader
from moiety_platform.usage.recorder import UsageRecorder
from moiety_wire.shared_fields import copy_fields

OPERATIONS_DRAIN_S = 1  # wait of a shutdown for a running scrape


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
    metrics.watch(lambda: trace_families(telemetry.tracing))
    database, report_database, keys, traces = open_stores(stack, settings, overrides.database)
    metrics.watch_statements(lambda: sum(counted.num_statements for counted in {database, report_database, keys}))
    store, objects, objects_ready = open_objects(stack, settings, database)
    usage, stored_usage, quotas = await start_accounting(stack, settings, process_id, database, overrides)
    idempotency = await start_idempotency(stack, settings, database, overrides)
    responses = ResponseService(database, ConversationLimits.of(settings), ResponseStore(overrides.now))
    content_writer = start_contents(stack, settings, live, database, ContentCipher(pepper, turn), overrides)
    recorder = RequestRecorder(usage, quotas, metrics, telemetry.tracing, clock, content_writer)
    start_recorder(stack, settings, live, recorder)
    machine = await start_machine_limits(stack, settings, metrics)
    meter = await start_meter(stack, database, stored_usage)
    metrics.registry.register(StoreCollector(clock, store, stored_usage, quotas, meter, recorder))
    contents = AdapterContents(database, objects)
    engines = await _connect_engines(stack, settings, live, overrides, quotas, meter, contents)
    next_turn_prefill = await start_next_turn_prefill(stack, usage, quotas, metrics, clock)
    authenticator = await stack.enter_async_context(Authenticator(keys, pepper, clock, turn=turn))
    classes, rules = ClassCache(database, clock), RequestRulesCache(database, clock)
    adapters = AdapterCache(database, clock)
    oidc = await stack.enter_async_context(OidcAuthentication(settings, database, clock))
    limit_keys_by_roles(settings, live, authenticator)
    retention = await start_retention(stack, live, settings, process_id, database, objects, metrics, overrides.now)
    reloader = reloader_of(source, live, metrics)
    texts, encoded = DocumentTextCache(settings.document_cache_bytes), open_encoding_cache(stack, settings, metrics)
    administration = Administration(
        settings, database, report_database, objects, (pepper, turn), clock, adapters, engines.replicas, texts, encoded
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
        has_open=administration.pending_work.has_open_batches,
    )  # fmt: skip
    images, documents = await open_files(stack, settings, live, batches, texts, metrics)
    guardrails = await stack.enter_async_context(GuardrailChecks(metrics, administration.reach))
    shadow = open_shadow_traffic(stack, recorder, engines, metrics)
    _follow_settings(live, metrics, telemetry, oidc, administration)
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
        background=await stack.enter_async_context(background_runs_of(responses, database, overrides, settings)),
        admin_routes=[admin],
        store=store,
        objects=objects_ready,
        machine=machine,
        batches=batches,
        adapters=adapters,
        live=live,
        reloader=reloader,
        next_turn_prefill=next_turn_prefill,
        images=images,
        documents=documents,
        quotes=QuoteSigner(pepper, turn),
        shadow=shadow,
        guardrails=guardrails,
        runs=await stack.enter_async_context(AgentRuns(database, quotas, clock)),
        encoding_cache=encoded,
        spot=spot_prices_of(database, engines, metrics, settings, overrides),
        receipts=receipts_of(settings, database, clock, stored_usage),
        waker=await start_waker(stack, settings, live, process_id, database, overrides, engines, metrics),
    )
    return _OpenParts(services, database, objects, stored_usage, retention, live, batches)


def _follow_settings(
    live: LiveSettings[GatewaySettings],
    metrics: Metrics,
    *followers: Telemetry | OidcAuthentication | Administration,
) -> None:
    for follower in followers:
        follower.followed_by(live)
    live.follow(["metrics_tenants"], lambda settings: metrics.tenants.use(settings.metrics_tenants))


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
