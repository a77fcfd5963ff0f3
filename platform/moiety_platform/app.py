"""The ASGI application: combines all routes over existing services. Owns no state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Litestar, Request, Response, Router
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.types import ControllerRouterHandler, ExceptionHandlersMap

from moiety_platform.administration.router import check_actions
from moiety_platform.admission.gate import AdmissionGate, StreamGate
from moiety_platform.allowed_methods import add_allow_header
from moiety_platform.anthropic_api.controller import MessageServices, TokenCountController, message_route
from moiety_platform.auth.client import owner_of_request
from moiety_platform.batches.assembly import Batches
from moiety_platform.controllers import with_services
from moiety_platform.cors import cross_origin_policy
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.decisions.controller import decision_route
from moiety_platform.embeddings.controller import embedding_route
from moiety_platform.embeddings.score_controller import score_routes
from moiety_platform.engine_metrics import EngineCollector
from moiety_platform.errors import PlatformError
from moiety_platform.expert_metrics import ExpertCollector
from moiety_platform.fast_path import GatewayApp
from moiety_platform.health import MetricsController, ProbeController, Probes
from moiety_platform.http_errors import (
    HAS_SCHEMA,
    answer_framework_error,
    answer_platform_error,
    answer_unexpected_error,
)
from moiety_platform.idempotency.limits import AnswerStorageLimits
from moiety_platform.inference.model_services import ModelServices
from moiety_platform.inference.model_text_cache import ModelTexts
from moiety_platform.inference.pipeline import RequestPipeline
from moiety_platform.inference.pipeline_services import PipelineLimits, PipelineServices, RequestServices
from moiety_platform.inference.request_body import BodyLimits, BodyReader
from moiety_platform.inference.request_record import CLIENT_CLOSED_REQUEST
from moiety_platform.inference.request_recorder import UsageSink
from moiety_platform.inference.response import ClientDisconnected
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.inference.token_count_limits import TokenCountLimits
from moiety_platform.known_parameters import guard_query
from moiety_platform.live_settings import LiveSettings
from moiety_platform.machine_limits import MachineLimits
from moiety_platform.message_batches.controller import message_batch_routes
from moiety_platform.models_api import ModelController
from moiety_platform.object_storage.readiness import ObjectStoreReadiness
from moiety_platform.openai_api.controller import completion_routes
from moiety_platform.openapi.controller import SchemaController, ServedDocuments
from moiety_platform.quotes_api.controller import QuoteController, quote_service_of, quote_terms_of
from moiety_platform.quotes_api.quote_service import QuoteService
from moiety_platform.receipts.controller import ReceiptController, ReceiptKeyController
from moiety_platform.receipts.service import Receipts
from moiety_platform.reloading.reloader import Reloader
from moiety_platform.request_head import add_request_id
from moiety_platform.responses_api.background import BackgroundRuns
from moiety_platform.responses_api.controller import (
    ResponseController,
    StoredResponses,
    compaction_route,
    response_route,
)
from moiety_platform.responses_api.conversation_controller import ConversationController, ConversationServices
from moiety_platform.responses_api.conversation_reader import ConversationReader
from moiety_platform.responses_api.conversation_service import ConversationService
from moiety_platform.responses_api.limits import ConversationLimits
from moiety_platform.responses_api.reasoning_cipher import ReasoningCipher
from moiety_platform.responses_api.response_service import ResponseService
from moiety_platform.responses_api.resumed_streams import ResumedStreams
from moiety_platform.responses_api.token_count import ResponseTokensController
from moiety_platform.routing.breaker_metrics import breaker_families
from moiety_platform.settings import GatewaySettings
from moiety_platform.spot.controller import SpotPriceController
from moiety_platform.traces.tracing import Tracing
from moiety_text.segment_cache import SegmentCache

BODY_SETTINGS = ("max_body_bytes", "max_json_depth", *ShapeLimits.__dataclass_fields__)
PIPELINE_SETTINGS = (
    "inline_tokenize_bytes",
    "encoding_cache_bytes",
    "max_inflight_per_tenant",
    "max_streams_per_key",
    "credit_window_tokens",
    "max_sequences",
    "clamp_max_tokens",
    "failover_wait_s",
    "prefix_routing",
    "expert_routing_tokens",
    "sse_keep_alive_s",
    *BODY_SETTINGS,
)
STORAGE_SETTINGS = (
    "idempotency_ttl_s", "idempotency_max_answer_bytes", "idempotency_max_keys_per_tenant",
    "idempotency_max_bytes_per_tenant", "responses_ttl_s", "responses_max_per_tenant", "responses_max_bytes_per_tenant",
    "responses_store_by_default",
)  # fmt: skip
BATCH_SETTINGS = (
    "max_file_bytes", "max_file_bytes_per_tenant", "keep_files_days", "max_batch_lines", "max_open_batches_per_tenant",
    "batch_concurrency", "batch_lease_s",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Services(RequestServices):
    """Services of the application. Opened and closed by the caller; `admin_routes` authenticate by themselves."""

    usage: UsageSink
    tracing: Tracing
    responses: ResponseService
    conversations: ConversationService
    cipher: ReasoningCipher
    background: BackgroundRuns
    receipts: Receipts
    encoding_cache: SegmentCache
    admin_routes: Sequence[ControllerRouterHandler] = ()
    store: StoreReadiness | None = None
    objects: ObjectStoreReadiness | None = None
    machine: MachineLimits | None = None
    batches: Batches | None = None
    live: LiveSettings[GatewaySettings] | None = None  # None: the settings never change
    reloader: Reloader[GatewaySettings] | None = None


class BoundedRequest(Request[Any, Any, Any]):
    """A framework request whose body is bounded by the application's current state."""

    async def stream(self) -> AsyncGenerator[bytes, None]:
        num_bytes, most = 0, self.app.state.max_body_bytes
        async for chunk in super().stream():
            num_bytes += len(chunk)
            if num_bytes > most:
                raise RequestEntityTooLarge
            yield chunk


def create_pipeline(settings: GatewaySettings, services: Services) -> RequestPipeline:
    """Return the pipeline of all inference requests of the process."""
    parts = PipelineServices(
        authenticator=services.authenticator,
        idempotency=services.idempotency,
        recorder=services.recorder,
        bodies=BodyReader(BodyLimits.of(settings)),
        gate=AdmissionGate(settings.max_inflight_per_tenant, services.clock),
        streams=StreamGate(settings.max_streams_per_key),
        classes=services.classes,
        rules=services.rules,
        replicas=services.replicas,
        texts=ModelTexts(settings.inline_tokenize_bytes, services.encoding_cache),
        metrics=services.metrics,
        clock=services.clock,
        images=services.images,
        documents=services.documents,
        shadow=services.shadow,
        guardrails=services.guardrails,
        runs=services.runs,
        spot=services.spot,
        adapters=services.adapters,
        next_turn_prefill=services.next_turn_prefill,
        waker=services.waker,
        quotes=services.quotes,
    )
    parts.replicas.use(settings.prefix_routing, settings.expert_routing_tokens)
    pipeline = RequestPipeline(parts, _limits_of(settings))

    def use(settings: GatewaySettings) -> None:
        pipeline.limits, parts.bodies.limits = _limits_of(settings), BodyLimits.of(settings)
        parts.texts.use(settings.inline_tokenize_bytes, settings.encoding_cache_bytes)
        parts.replicas.use(settings.prefix_routing, settings.expert_routing_tokens)
        parts.gate.limit, parts.streams.limit = settings.max_inflight_per_tenant, settings.max_streams_per_key

    if services.live is not None:
        services.live.follow(PIPELINE_SETTINGS, use)
    return pipeline


def _limits_of(settings: GatewaySettings) -> PipelineLimits:
    return PipelineLimits(
        settings.credit_window_tokens,
        settings.max_sequences,
        settings.failover_wait_s,
        settings.sse_keep_alive_s,
        settings.clamp_max_tokens,
    )


def create_app(settings: GatewaySettings, services: Services, pipeline: RequestPipeline | None = None) -> Litestar:
    """Return the gateway's application over running services; it creates a pipeline if none is given."""
    pipeline = pipeline or create_pipeline(settings, services)
    services.metrics.registry.register(EngineCollector(services.replicas.states))
    services.metrics.watch(lambda: breaker_families(services.replicas.breakers))
    services.metrics.registry.register(ExpertCollector(services.replicas.states))
    serve, bodies, texts = pipeline.serve, pipeline.services.bodies, pipeline.services.texts
    replicas, adapters, rules = services.replicas, services.adapters, services.rules
    files = services.images, services.documents
    counts = TokenCountLimits(services.recorder.quotas, settings.max_token_counts_per_tenant)
    messages = MessageServices(services.authenticator, bodies, replicas, texts, *files, rules, counts, adapters)
    resumed_gate = StreamGate(settings.max_resumed_streams_per_tenant, "tenant", "resumed streams")
    resumed = ResumedStreams(
        services.responses, pipeline.services.streams, resumed_gate, lambda: services.background.is_draining
    )
    stored = StoredResponses(services.responses, services.background, resumed)
    owner = owner_of_request(services.authenticator)
    reader = ConversationReader(services.responses, services.cipher)
    conversations = ConversationServices(bodies, services.conversations, reader)
    quotes = quote_service_of(pipeline, reader, settings, counts)
    has_operations = settings.has_operations_on_port
    models = ModelServices(services.authenticator, replicas, texts, bodies, *files, rules, counts, adapters)
    probes = Probes(
        replicas, services.store, services.objects, with_reasons=has_operations, machine=services.machine,
        num_open_requests=lambda: services.recorder.num_open,
    )  # fmt: skip
    operations = _operations_routes(services, ServedDocuments(lambda: bodies.limits.shape)) if has_operations else []
    app = GatewayApp(
        route_handlers=[
            *completion_routes(serve),
            embedding_route(serve),
            *score_routes(serve),
            decision_route(serve),
            message_route(serve),
            with_services(TokenCountController, messages=messages),
            response_route(serve, services.responses, services.cipher, services.background, resumed),
            compaction_route(serve, services.responses, services.cipher),
            with_services(ResponseTokensController, models=models, reader=reader),
            with_services(QuoteController, authenticator=services.authenticator, quotes=quotes),
            with_services(ReceiptController, owner=owner, receipts=services.receipts),
            with_services(ReceiptKeyController, receipts=services.receipts),
            with_services(
                SpotPriceController, owner=owner, spot=services.spot, spot_rules=rules, spot_classes=services.classes
            ),
            with_services(ConversationController, owner=owner, conversations=conversations),
            with_services(ResponseController, owner=owner, stored=stored),
            with_services(ModelController, models=models),
            with_services(ProbeController, probes=probes),
            *(_batch_routes(services.batches) if services.batches is not None else ()),
            *services.admin_routes,
            *operations,
        ],
        exception_handlers=EXCEPTION_HANDLERS,
        guards=[guard_query],
        before_send=[add_request_id, add_allow_header],
        openapi_config=None,  # we generate the OpenAPI documents
        request_class=BoundedRequest,
        request_max_body_size=None,
        state=State({"max_body_bytes": settings.max_body_bytes, HAS_SCHEMA: has_operations}),
        logging_config=None,
    )
    check_actions(app)
    app.cross_origin = cross_origin_policy(settings.cors_allowed_origins)
    if services.live is not None:
        _follow(services.live, app, services, resumed_gate, quotes, counts)
    return app


def _batch_routes(batches: Batches) -> list[Router]:
    return [*batches.routes(), message_batch_routes(batches)]


def _follow(
    live: LiveSettings[GatewaySettings],
    app: GatewayApp,
    services: Services,
    resumed_gate: StreamGate,
    quotes: QuoteService,
    token_counts: TokenCountLimits,
) -> None:
    """Apply changed bounds, origins and terms of quotes to later requests."""

    def bound(settings: GatewaySettings) -> None:
        app.state.max_body_bytes = settings.max_body_bytes

    def keep(settings: GatewaySettings) -> None:
        services.idempotency.limits = AnswerStorageLimits.of(settings)
        services.responses.limits = ConversationLimits.of(settings)

    def resume(settings: GatewaySettings) -> None:
        resumed_gate.limit = settings.max_resumed_streams_per_tenant

    def open_to(settings: GatewaySettings) -> None:
        app.cross_origin = cross_origin_policy(settings.cors_allowed_origins)

    def quote(settings: GatewaySettings) -> None:
        quotes.terms = quote_terms_of(settings)

    def count(settings: GatewaySettings) -> None:
        token_counts.max_open_per_tenant = settings.max_token_counts_per_tenant

    def price_spot(settings: GatewaySettings) -> None:
        services.spot.interval_s = settings.spot_interval_s

    live.follow(["spot_interval_s"], price_spot)
    live.follow(["max_body_bytes"], bound)
    live.follow(["max_token_counts_per_tenant"], count)
    live.follow(["quote_ttl_s", "quote_margin"], quote)
    live.follow(["max_resumed_streams_per_tenant"], resume)
    live.follow(["cors_allowed_origins"], open_to)
    live.follow([*STORAGE_SETTINGS, "max_messages", "max_body_bytes"], keep)
    if services.batches is not None:
        live.follow([*BATCH_SETTINGS, *BODY_SETTINGS], services.batches.use)


def create_operations_app(
    services: Services, app: Litestar, settings: Callable[[], GatewaySettings], is_stopping: Callable[[], bool]
) -> Litestar:
    """Return the application of the operations listener. Its OpenAPI documents describe the gateway's `app`."""
    probes = Probes(
        services.replicas, services.store, services.objects, with_reasons=True, is_stopping=is_stopping,
        machine=services.machine, num_open_requests=lambda: services.recorder.num_open,
    )  # fmt: skip
    documents = ServedDocuments(lambda: ShapeLimits.of(settings()), app)
    return GatewayApp(
        route_handlers=[with_services(ProbeController, probes=probes), *_operations_routes(services, documents)],
        exception_handlers=EXCEPTION_HANDLERS,
        guards=[guard_query],
        before_send=[add_request_id, add_allow_header],
        openapi_config=None,
        state=State({"max_body_bytes": settings().max_body_bytes, HAS_SCHEMA: True}),
        logging_config=None,
    )


def _operations_routes(services: Services, documents: ServedDocuments) -> list[Router]:
    """Return the routes that only operators may reach."""
    return [
        with_services(MetricsController, source=services.metrics, store=services.store),
        with_services(SchemaController, served=documents),
    ]


def _answer_disconnected(_request: Request[Any, Any, Any], _error: ClientDisconnected) -> Response[None]:
    return Response(None, status_code=CLIENT_CLOSED_REQUEST)


EXCEPTION_HANDLERS: ExceptionHandlersMap = {
    PlatformError: answer_platform_error,
    HTTPException: answer_framework_error,
    ClientDisconnected: _answer_disconnected,
    Exception: answer_unexpected_error,
}
