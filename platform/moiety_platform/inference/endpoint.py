"""Inference endpoints: what each path of each API accepts and how it formats answers and errors."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from moiety_platform.fast_path import DIRECT
from moiety_platform.http_errors import OPENAI_ERRORS, ErrorForm
from moiety_platform.inference.body_fields import InferenceBody
from moiety_platform.inference.idempotency import Resume
from moiety_platform.inference.request_record import RequestRecord
from moiety_platform.inference.response import KEEP_ALIVE_COMMENT, HttpResponse
from moiety_platform.inference.run import InferenceRun
from moiety_platform.openapi.described import EVENTS, JSON, Described, describes
from moiety_platform.openapi.documents import KEY
from moiety_platform.openapi.headers import IDEMPOTENCY_KEY, QUOTA_HEADERS
from moiety_platform.openapi.tags_header import TAGS_HEADER
from moiety_platform.quotes.quote import QUOTE_HEADER
from moiety_platform.request_head import bearer_authorization

QUOTED = ("chat", "text_completion")  # operations whose requests can send quotes

Body = TypeVar("Body", bound=InferenceBody)
SendLast = Callable[[], Awaitable[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndpointDocs:
    """OpenAPI description of an endpoint beside its body.

    `answer` is the type of a complete answer, and `event` the schema of each event of a streamed one, None where
    nothing is streamed (see `event_of`).
    """

    tag: str
    summary: str
    detail: str
    answer: Any
    event: Any = None
    security: tuple[str, ...] = (KEY,)  # one of these is enough
    headers: tuple[str, ...] = ()  # beside those of every inference answer

    @property
    def answers(self) -> dict[str, Any]:
        return {JSON: self.answer} if self.event is None else {JSON: self.answer, EVENTS: self.event}


@dataclass(frozen=True, slots=True)
class Endpoint(Generic[Body]):
    """One path of one API.

    `prepare` adds to the body what must be looked up before an engine gets the request. `accept` is called once every
    check of the gateway has passed, before an engine gets the request. `resume` returns the events of a stored stream
    by its id, for a repetition of the request that began it. `answer` is called once the request is admitted: it reads
    the run to its end and sends the answer except for its last part. The returned function sends that part, once the
    request is recorded as completed.
    """

    path: str
    operation: str  # OpenTelemetry's name for it
    id_prefix: str
    schema: type[Body]
    answer: Callable[[Body, InferenceRun, RequestRecord, HttpResponse], Awaitable[SendLast]]
    shown: EndpointDocs
    prepare: Callable[[Body, RequestRecord], Awaitable[Body]] | None = None
    accept: Callable[[Body, RequestRecord, HttpResponse], Awaitable[None]] | None = None
    resume: Resume | None = None
    errors: ErrorForm = OPENAI_ERRORS
    authorization: Callable[[Mapping[bytes, bytes]], str | None] = bearer_authorization
    headers: Callable[[Mapping[str, str]], dict[str, str]] = dict  # of a response, from those that every API has
    keep_alive: bytes = KEEP_ALIVE_COMMENT  # event of a stream that carries nothing
    ignored_parameters: frozenset[str] = frozenset()  # query parameters that clients send and that change nothing


Serve = Callable[[Endpoint[Any], Scope, Receive, Send], Awaitable[None]]


def route(endpoint: Endpoint[Any], serve: Serve) -> HTTPRouteHandler:
    """Return the handler of an endpoint, whose requests are served by `RequestPipeline.serve`."""
    shown = endpoint.shown
    app: ASGIApp = partial(serve, endpoint)
    described = Described(
        error=endpoint.errors.schema,
        body={JSON: endpoint.schema},
        answers={200: shown.answers},
        errors=(404, 409, 410, 422, 429, 502, *endpoint.errors.statuses),
        request_headers=(IDEMPOTENCY_KEY, TAGS_HEADER, *((QUOTE_HEADER,) if endpoint.operation in QUOTED else ())),
        answer_headers=(*QUOTA_HEADERS, *shown.headers),
    )

    @post(
        endpoint.path,
        name=endpoint.path,
        tags=[shown.tag],
        summary=shown.summary,
        description=shown.detail,
        security=[{name: []} for name in shown.security],
        opt={**describes(described), DIRECT: app},
    )
    async def create(request: Request[Any, Any, Any]) -> ASGIApp:
        return app

    return create
