"""The ASGI application: every route put together from services that exist already. Owns no state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from litestar import Litestar, Request, Response
from litestar.exceptions import HTTPException
from litestar.types import ControllerRouterHandler

from moiety_platform.adapters.cache import AdapterCache
from moiety_platform.admission.gate import AdmissionGate
from moiety_platform.admission.streams import StreamGate
from moiety_platform.allowed_methods import tell_allowed_methods
from moiety_platform.anthropic_api.controller import MessageServices, message_routes
from moiety_platform.auth.admin import check_actions
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.batches.assembly import Batches
from moiety_platform.classes.cache import ClassCache
from moiety_platform.clock import Clock
from moiety_platform.completions.controller import completion_routes
from moiety_platform.completions.disconnect import ClientDisconnected
from moiety_platform.completions.exchange import ExchangeServices
from moiety_platform.completions.limits import ShapeLimits
from moiety_platform.completions.once import Once
from moiety_platform.completions.pipeline import Pipeline
from moiety_platform.completions.record import CLIENT_CLOSED_REQUEST
from moiety_platform.completions.recorder import RequestRecorder, UsageSink
from moiety_platform.completions.text import ModelTexts
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.direct import GatewayApp
from moiety_platform.embeddings.controller import embedding_route
from moiety_platform.engine_metrics import EngineCollector
from moiety_platform.errors import PlatformError
from moiety_platform.expert_metrics import ExpertCollector
from moiety_platform.foresight.foreseer import Foreseer
from moiety_platform.health import health_routes
from moiety_platform.http_errors import answer_framework_error, answer_platform_error, answer_unexpected_error
from moiety_platform.idempotency.keeper import IdempotencyKeeper
from moiety_platform.metrics import Metrics
from moiety_platform.models_api import ModelServices, model_routes
from moiety_platform.openapi.controller import schema_routes
from moiety_platform.prices.cache import PriceCache
from moiety_platform.request_ids import add_request_id
from moiety_platform.responses_api.controller import ResponseServices, response_routes
from moiety_platform.responses_api.keeper import ResponseKeeper
from moiety_platform.routing.replicas import Replicas
from moiety_platform.settings import GatewaySettings
from moiety_platform.traces.tracing import Tracing


@dataclass(frozen=True, slots=True)
class Services:
    """What the application is made of. Opened and closed by whoever makes it; `admin_routes` bring their own door."""

    authenticator: Authenticator
    usage: UsageSink
    replicas: Replicas
    classes: ClassCache
    prices: PriceCache
    metrics: Metrics
    tracing: Tracing
    clock: Clock
    recorder: RequestRecorder
    idempotency: IdempotencyKeeper
    responses: ResponseKeeper
    admin_routes: Sequence[ControllerRouterHandler] = ()
    store: StoreReadiness | None = None
    batches: Batches | None = None
    adapters: AdapterCache | None = None
    foreseer: Foreseer | None = None


def create_pipeline(settings: GatewaySettings, services: Services) -> Pipeline:
    """What every request of the process goes through."""
    return Pipeline(
        services.replicas,
        ModelTexts(settings.inline_tokenize_bytes),
        services.classes,
        services.prices,
        AdmissionGate(settings.max_inflight_per_tenant, services.clock),
        services.clock,
        credit_window=settings.credit_window_tokens,
        max_sequences=settings.max_sequences,
        failover_wait_s=settings.failover_wait_s,
        adapters=services.adapters,
    )


def create_app(settings: GatewaySettings, services: Services, pipeline: Pipeline | None = None) -> Litestar:
    """The gateway's application over running services; with a pipeline of its own if none is given."""
    pipeline = pipeline or create_pipeline(settings, services)
    services.metrics.registry.register(EngineCollector(services.replicas.states))
    services.metrics.registry.register(ExpertCollector(services.replicas.states))
    limits: dict[str, int] = {"max_body_bytes": settings.max_body_bytes, "max_json_depth": settings.max_json_depth}
    shape = ShapeLimits.of(settings)
    exchange = ExchangeServices(
        services.authenticator,
        services.recorder,
        pipeline,
        Once(services.idempotency, services.metrics, settings.max_body_bytes),
        services.metrics,
        **limits,
        shape=shape,
        streams=StreamGate(settings.max_streams_per_key),
        foreseer=services.foreseer,
    )
    models = ModelServices(
        services.authenticator, services.replicas, pipeline.texts, **limits, shape=shape, adapters=services.adapters
    )
    app = GatewayApp(
        route_handlers=[
            *completion_routes(exchange),
            embedding_route(exchange),
            *message_routes(MessageServices(exchange, services.replicas, pipeline.texts, services.adapters)),
            *response_routes(ResponseServices(exchange, services.responses)),
            *model_routes(models),
            *health_routes(services.replicas, services.metrics, services.store),
            *(services.batches.routes() if services.batches is not None else ()),
            *services.admin_routes,
            *schema_routes(shape),
        ],
        exception_handlers={
            PlatformError: answer_platform_error,
            HTTPException: answer_framework_error,
            ClientDisconnected: _answer_nobody,
            Exception: answer_unexpected_error,
        },
        before_send=[add_request_id, tell_allowed_methods],
        openapi_config=None,  # the documents are ours
        request_max_body_size=settings.max_body_bytes,
        logging_config=None,
    )
    check_actions(app)
    return app


def _answer_nobody(_request: Request[Any, Any, Any], _error: ClientDisconnected) -> Response[None]:
    return Response(None, status_code=CLIENT_CLOSED_REQUEST)
