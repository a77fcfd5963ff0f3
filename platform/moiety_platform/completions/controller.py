"""HTTP to the pipeline and back: `/v1/chat/completions` and `/v1/completions`.

A request is read, answered and ended in one place, `_Exchange.__call__`; its record is closed before an error is told.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import structlog
from litestar import Request, post
from litestar.handlers import HTTPRouteHandler
from litestar.types import ASGIApp, Receive, Scope, Send

from moiety_platform.admission.streams import StreamGate
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.auth.principal import Principal
from moiety_platform.auth.scopes import INFERENCE_SCOPE, require_scope
from moiety_platform.completions.answers import AnswerHead, Choice, chat_answer, completion_answer
from moiety_platform.completions.body import receive_body
from moiety_platform.completions.disconnect import ClientDisconnected, watching_for_disconnect
from moiety_platform.completions.limits import ShapeLimits
from moiety_platform.completions.once import Once
from moiety_platform.completions.pipeline import Pipeline
from moiety_platform.completions.record import RequestRecord
from moiety_platform.completions.recorder import STOPPING, RequestRecorder
from moiety_platform.completions.reply import ABORT_CONNECTION, Reply
from moiety_platform.completions.run import Run
from moiety_platform.completions.schemas import ChatBody, CompletionBody, GenerationBody
from moiety_platform.completions.sse import DONE, ChatChunks, Chunks, CompletionChunks
from moiety_platform.errors import Forbidden, PlatformError, Unauthenticated
from moiety_platform.headers import header_of
from moiety_platform.http_errors import internal_error
from moiety_platform.metrics import Metrics
from moiety_platform.request_ids import request_id_of
from moiety_wire.messages import Finished

CLASS_HEADER = "x-moiety-class"  # the class that is served
ADMISSION_HEADER = "x-moiety-admission"  # the reason code of the engine's verdict

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class CompletionServices:
    """What the two endpoints need."""

    authenticator: Authenticator
    recorder: RequestRecorder
    pipeline: Pipeline
    once: Once
    metrics: Metrics
    max_body_bytes: int
    max_json_depth: int
    shape: ShapeLimits
    streams: StreamGate
    send_timeout_s: float


@dataclass(frozen=True, slots=True)
class _Endpoint:
    path: str
    operation: str
    id_prefix: str
    schema: type[GenerationBody]


CHAT = _Endpoint("/v1/chat/completions", "chat", "chatcmpl-", ChatBody)
COMPLETIONS = _Endpoint("/v1/completions", "text_completion", "cmpl-", CompletionBody)


def completion_routes(services: CompletionServices) -> list[HTTPRouteHandler]:
    """The handlers of both endpoints."""
    return [_route(CHAT, services), _route(COMPLETIONS, services)]


def _route(endpoint: _Endpoint, services: CompletionServices) -> HTTPRouteHandler:
    @post(endpoint.path, name=endpoint.operation)
    async def create(request: Request[Any, Any, Any]) -> ASGIApp:
        return _Exchange(endpoint, services)

    return create


class _Exchange:
    """One request and its answer, as an ASGI application."""

    def __init__(self, endpoint: _Endpoint, services: CompletionServices) -> None:
        self._endpoint = endpoint
        self._services = services

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        reply = Reply(send, self._services.send_timeout_s, scope.get("state", {}).get(ABORT_CONNECTION))
        try:
            principal = await self._authenticate(scope)
            await self._services.once.serve(
                principal, self._endpoint.path, scope, receive, reply, partial(self._serve, principal, scope, reply)
            )
        except ClientDisconnected:
            return
        except asyncio.CancelledError:
            await _tell(reply, STOPPING)
            raise
        except PlatformError as exc:
            await _tell(reply, exc)
        except Exception:  # the root of a request: told as 500, logged whole
            log.exception("request_failed", request_id=request_id_of(scope))
            await _tell(reply, internal_error())

    async def _authenticate(self, scope: Scope) -> Principal:
        try:
            principal = await self._services.authenticator.authenticate(header_of(scope, b"authorization"))
            require_scope(principal, INFERENCE_SCOPE)
        except (Unauthenticated, Forbidden) as exc:
            self._services.metrics.observe_refusal(exc.status)
            raise
        return principal

    async def _serve(self, principal: Principal, scope: Scope, reply: Reply, receive: Receive) -> None:
        services, endpoint = self._services, self._endpoint
        async with services.recorder.open(
            principal,
            request_id=endpoint.id_prefix + secrets.token_hex(16),
            client_request_id=request_id_of(scope),
            operation=endpoint.operation,
            endpoint=endpoint.path,
            traceparent=header_of(scope, b"traceparent"),
            tracestate=header_of(scope, b"tracestate"),
        ) as record:
            body = await receive_body(
                endpoint.schema,
                receive,
                scope["headers"],
                services.max_body_bytes,
                services.max_json_depth,
                services.shape,
            )
            with services.streams.hold(principal.root_key_id) if body.stream else contextlib.nullcontext():
                await self._answer(body, record, receive, reply)

    async def _answer(self, body: GenerationBody, record: RequestRecord, receive: Receive, reply: Reply) -> None:
        last: bytes | None = None
        async with (
            watching_for_disconnect(receive),
            self._services.pipeline.run(record, body.generation()) as run,
        ):
            reply.headers = {
                CLASS_HEADER: record.service_class,
                ADMISSION_HEADER: record.admission_reason,
                **record.spending.headers(),
            }
            echoes = await _echoes(body, run)
            if body.stream:
                last = await _relay(body, run, record, reply, echoes)
            else:
                answer = await _collect(body, run, record, echoes)
        record.completed()
        if last is not None:
            await reply.end_stream(last)
        else:
            await reply.whole(200, msgspec.json.encode(answer))


async def _tell(reply: Reply, error: PlatformError) -> None:
    """Send an error to a client that may have stopped to read."""
    with contextlib.suppress(ClientDisconnected):
        await reply.fail(error)


async def _collect(body: GenerationBody, run: Run, record: RequestRecord, echoes: Sequence[str]) -> dict[str, Any]:
    """Wait for all choices; the whole answer."""
    choices = [Choice() for _ in run.streams]
    async for index, message in run:
        choice = choices[index]
        choice.text.append(message.text)
        if isinstance(message, Finished):
            choice.finish_reason = message.reason.value
        elif message.logprobs:
            choice.logprobs += message.logprobs
    head = _head(run, record)
    if isinstance(body, ChatBody):
        return chat_answer(head, choices, run.usage(), with_logprobs=bool(body.logprobs))
    assert isinstance(body, CompletionBody)
    return completion_answer(head, choices, run.usage(), echoes=echoes, with_logprobs=body.logprobs is not None)


async def _relay(body: GenerationBody, run: Run, record: RequestRecord, reply: Reply, echoes: Sequence[str]) -> bytes:
    """Stream all choices as they come; returns what is to be sent last. The answer starts with the first tokens, so
    that a request which an engine refuses still gets its proper status."""
    chunks = _chunks(body, run, record, echoes)
    opened = [False] * len(run.streams)
    async for index, message in run:
        parts: list[bytes] = []
        if not opened[index]:
            opened[index] = True
            parts.append(chunks.opening(index))
        if isinstance(message, Finished):
            if message.text:
                parts.append(chunks.piece(index, message.text, None))
            parts.append(chunks.closing(index, message.reason.value))
        elif message.text or message.logprobs:
            parts.append(chunks.piece(index, message.text, message.logprobs))
        data = b"".join(parts)
        if data:
            record.answered_status = 200
            await reply.stream(data)
    return chunks.usage(run.usage()) + DONE if body.include_usage else DONE


def _chunks(body: GenerationBody, run: Run, record: RequestRecord, echoes: Sequence[str]) -> Chunks:
    head = _head(run, record)
    if isinstance(body, CompletionBody):
        return CompletionChunks(head, body.include_usage, echoes)
    return ChatChunks(head, body.include_usage)


def _head(run: Run, record: RequestRecord) -> AnswerHead:
    return AnswerHead(
        answer_id=record.request_id,
        created=record.arrival_unix_ns // 1_000_000_000,
        model=record.served_model,
        system_fingerprint=run.text.fingerprint,
        service_tier=record.served_tier,
    )


async def _echoes(body: GenerationBody, run: Run) -> Sequence[str]:
    """The prompt's text for each choice if the request wants it, else empty strings."""
    if not isinstance(body, CompletionBody) or not body.echo:
        return [""] * len(run.streams)
    prompts = [
        prompt if isinstance(prompt, str) else await run.text.decode(token_ids)
        for prompt, token_ids in zip(body.generation().prompts, run.prompts, strict=True)
    ]
    return [prompt for prompt in prompts for _ in range(body.n or 1)]
