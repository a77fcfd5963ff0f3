"""One request over HTTP and its answer, in whichever API's words. Those are an `Endpoint`'s business.

A request is read, answered and ended in one place, `RequestHandler.__call__`; its record is closed before an error
is told.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import structlog
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from moiety_platform.admission.gate import StreamGate
from moiety_platform.admission.turns import Turns
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import INFERENCE_SCOPE, Principal, require_scope
from moiety_platform.direct import DIRECT
from moiety_platform.errors import Forbidden, PlatformError, Unauthenticated, forget_frames
from moiety_platform.http_errors import OPENAI_ERRORS, ErrorForm, internal_error
from moiety_platform.inference.body_fields import AskingBody
from moiety_platform.inference.idempotency import IdempotentRequests
from moiety_platform.inference.pipeline import Pipeline
from moiety_platform.inference.request_body import receive_body
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.request_recorder import STOPPING, RequestRecorder
from moiety_platform.inference.response import ClientDisconnected, HttpResponse, WatchingForDisconnect
from moiety_platform.inference.run import Run
from moiety_platform.inference.shape_limits import ShapeLimits
from moiety_platform.known_parameters import check_query
from moiety_platform.metrics import Metrics
from moiety_platform.openapi.described import EVENTS, JSON, Described, describes
from moiety_platform.openapi.documents import KEY
from moiety_platform.openapi.headers import IDEMPOTENCY_KEY, OF_SPENDING
from moiety_platform.randomness import ordered_hex
from moiety_platform.request_head import authorization_of, header_of, request_id_of
from moiety_platform.speculative_prefill.next_turn_prefill import NextTurnPrefill

CLASS_HEADER = "x-moiety-class"  # the class that is served
ADMISSION_HEADER = "x-moiety-admission"  # the reason code of the engine's verdict

Body = TypeVar("Body", bound=AskingBody)
SendLast = Callable[[], Awaitable[None]]

log = structlog.get_logger(__name__)


@dataclass(slots=True)
class HandlerServices:
    """Services of every inference endpoint. The bounds may be set to others, for the bodies that
    are read from then on."""

    authenticator: Authenticator
    recorder: RequestRecorder
    pipeline: Pipeline
    once: IdempotentRequests
    metrics: Metrics
    max_body_bytes: int
    max_json_depth: int
    shape: ShapeLimits
    streams: StreamGate
    turns: Turns
    next_turn_prefill: NextTurnPrefill | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDocs:
    """OpenAPI description of an endpoint beside its body. `answer` is the type of a whole answer, `event` the schema
    of each event of a streamed one, None where nothing streams (see `event_of`)."""

    tag: str
    summary: str
    detail: str
    answer: Any
    event: Any = None
    security: tuple[str, ...] = (KEY,)  # one of these is enough
    headers: tuple[str, ...] = ()  # beside those of every such answer

    @property
    def answers(self) -> dict[str, Any]:
        return {JSON: self.answer} if self.event is None else {JSON: self.answer, EVENTS: self.event}


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """One path of one API: what it takes, and how it words what comes. `prepare` gives the body what must be looked up
    before anything is asked of an engine. `answer` is called once the request is admitted: it reads the run to its end
    and sends what there is to send meanwhile. What it returns sends the rest, once the request is known to be
    completed."""

    path: str
    operation: str  # OpenTelemetry's name for it
    id_prefix: str
    schema: type[Body]
    answer: Callable[[Body, Run, RequestRecord, HttpResponse], Awaitable[SendLast]]
    shown: EndpointDocs
    prepare: Callable[[Body, RequestRecord], Awaitable[Body]] | None = None
    errors: ErrorForm = OPENAI_ERRORS
    authorization: Callable[[Scope], str | None] = authorization_of
    ignored_parameters: frozenset[str] = frozenset()  # of the query string: clients send them, and they change nothing


def route(endpoint: Endpoint[Body], services: HandlerServices) -> HTTPRouteHandler:
    """The handler of an endpoint."""

    shown, exchange = endpoint.shown, RequestHandler(endpoint, services)
    described = Described(
        error=endpoint.errors.schema,
        body={JSON: endpoint.schema},
        answers={200: shown.answers},
        errors=(404, 409, 410, 422, 429, 502, *endpoint.errors.statuses),
        request_headers=(IDEMPOTENCY_KEY,),
        answer_headers=(*OF_SPENDING, *shown.headers),
    )

    @post(
        endpoint.path,
        name=endpoint.path,
        tags=[shown.tag],
        summary=shown.summary,
        description=shown.detail,
        security=[{name: []} for name in shown.security],
        opt={**describes(described), DIRECT: exchange},
    )
    async def create(request: Request[Any, Any, Any]) -> ASGIApp:
        return exchange

    return create


class RequestHandler(Generic[Body]):
    """An endpoint's requests and their answers, as an ASGI application."""

    def __init__(self, endpoint: Endpoint[Body], services: HandlerServices) -> None:
        self._endpoint = endpoint
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = HttpResponse(send, scope, self._endpoint.errors)
        try:
            principal = await self._authenticate(scope)
            if scope["query_string"]:
                check_query(scope["query_string"], (), self._endpoint.ignored_parameters)
            await self._services.once.serve(
                principal, self._endpoint.path, scope, receive, reply, partial(self._serve, principal, scope, reply)
            )
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            await _tell(reply, STOPPING)
            raise
        except PlatformError as exc:
            forget_frames(exc)
            await _tell(reply, exc)
        except Exception:  # the root of a request: told as 500, logged whole
            log.exception("request_failed", request_id=request_id_of(scope))
            await _tell(reply, internal_error())

    async def _authenticate(self, scope: Scope) -> Principal:
        try:
            principal = await self._services.authenticator.authenticate(self._endpoint.authorization(scope))
            require_scope(principal, INFERENCE_SCOPE)
        except (Unauthenticated, Forbidden) as exc:
            self._services.metrics.observe_refusal(exc.status)
            raise
        return principal

    async def _serve(self, principal: Principal, scope: Scope, reply: HttpResponse, receive: Receive) -> None:
        services, endpoint = self._services, self._endpoint
        async with services.recorder.open(
            principal,
            request_id=endpoint.id_prefix + ordered_hex(),
            client_request_id=request_id_of(scope),
            operation=endpoint.operation,
            endpoint=endpoint.path,
            traceparent=header_of(scope, b"traceparent"),
            status_of=endpoint.errors.status,
        ) as record:
            body = await receive_body(
                endpoint.schema,
                receive,
                scope["headers"],
                services.max_body_bytes,
                services.max_json_depth,
                services.shape,
                partial(services.turns.wait, principal.tenant_id),
            )
            with services.streams.hold(principal.root_key_id) if body.wants_stream else contextlib.nullcontext():
                await self._answer(body, record, reply)

    async def _answer(self, body: Body, record: RequestRecord, reply: HttpResponse) -> None:
        endpoint = self._endpoint
        with WatchingForDisconnect(reply.transfer):
            if endpoint.prepare is not None:
                body = await endpoint.prepare(body, record)
            async with self._services.pipeline.run(record, body.generation(), streams=body.wants_stream) as run:
                reply.headers = {
                    CLASS_HEADER: record.service_class,
                    ADMISSION_HEADER: record.admission_reason,
                    **record.spending.headers(),
                }
                send_last = await endpoint.answer(body, run, record, reply)
        record.completed()
        await send_last()
        if self._services.next_turn_prefill is not None:
            self._services.next_turn_prefill.ended(record, run)


async def _tell(reply: HttpResponse, error: PlatformError) -> None:
    """Send an error to a client that may have stopped to read."""
    with contextlib.suppress(ClientDisconnected):
        await reply.fail(error)
