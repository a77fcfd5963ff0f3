"""One HTTP request to an external engine: sends it, reads its stream to the end, and reports failures to the stream.

It owns the connection for the lifetime of the request. Closing the connection aborts the request at the server.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import httpx
import msgspec
import structlog

from moiety_platform.clock import Clock
from moiety_platform.engine_client.chat_submit import ChatSubmit
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import EngineFailed, EngineOverloaded, EngineRefused, PlatformError, Unavailable
from moiety_platform.external_engines.answer import ExternalAnswer
from moiety_platform.external_engines.content_encoding import content_of
from moiety_platform.external_engines.dialect import Dialect, MalformedAnswer
from moiety_platform.external_engines.events import DONE, Event, EventParser
from moiety_platform.external_engines.failures import cleaned, error_of_answer
from moiety_wire.messages import Submit

MAX_ERROR_BYTES = 64 * 1024
FIRST_PAUSE_S, MAX_PAUSE_S = 0.5, 5.0  # before a request is sent again
RESEND_WITHIN_S = 0.5  # of the end of a request; a connection that was closed before shows it within a round trip
DISCONNECTED = "Server disconnected"  # the beginning of httpcore's message
GRACE_S = 1.0  # to wait for counts and the end of the stream after the finish reason
PROTOCOL_VIOLATION = "engine_protocol_violation"

log = structlog.get_logger(__name__)


@dataclass(eq=False, repr=False)
class ExternalRequest:
    """One request that delivers to one stream. `run` is called once.

    `on_bytes` is called for all received data, `on_break` with the reason if the connection breaks.
    """

    http: httpx.AsyncClient
    url: str
    dialect: Dialect
    submit: Submit
    answer: ExternalAnswer
    stream: EngineStream
    clock: Clock
    on_bytes: Callable[[], None]
    on_break: Callable[[str], None]
    retries: int = 0  # of a request that the server refused to begin, or that did not reach it
    resends: int = 0  # of a request whose kept connection the server had closed

    async def run(self) -> None:
        """Send the request and deliver the answer until its end or a failure. May be cancelled at any time."""
        try:
            await self._ask()
        except PlatformError as error:
            self._fail_or_end(error)
        except MalformedAnswer as error:
            message = f"the engine broke the protocol: {error}"
            self._fail_or_end(EngineFailed(message, code=PROTOCOL_VIOLATION))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self.on_break(f"cannot be reached: {error}")
            self._fail(Unavailable("the engine cannot be reached; try again shortly", retry_after_s=1))
        except httpx.HTTPError as error:
            if self.answer.has_finished:
                self._end()
                return
            self.on_break(f"the connection broke: {error or type(error).__name__}")
            self._fail(EngineFailed("the engine was lost while it answered; send the request again"))
        except Exception:  # root of a task: fail the stream and log the traceback
            log.exception("engine_exchange_failed", request_id=self.submit.request_id)
            self.stream.fail(EngineFailed("the engine's answer could not be read; send the request again"))

    def _fail_or_end(self, error: PlatformError) -> None:
        """End the stream after a finish reason, despite a later error. Otherwise fail it."""
        if self.answer.has_finished:
            self._end()
        else:
            self._fail(error)

    def _fail(self, error: PlatformError) -> None:
        """Log the server's message for the operator, and fail the stream with a message for the client."""
        if self.stream.ended:
            return
        upstream = error.upstream
        if upstream is not None:
            sent = self.http.headers
            keys = sent.get("authorization", "").removeprefix("Bearer "), sent.get("x-api-key", "")
            error.upstream = upstream = cleaned(upstream, filter(None, keys))
        log.warning(
            "engine_request_failed",
            engine=self.url,
            request_id=self.submit.request_id,
            error_code=error.code,
            error=error.message,
            upstream_status=None if upstream is None else upstream.status,
            upstream_message=None if upstream is None else upstream.message,
        )
        self.stream.fail(error)

    async def _ask(self) -> None:
        answer, submit = self.answer, self.submit
        if answer.resume():
            self.stream.deliver(answer.accept())
            self.stream.deliver(answer.end())
            return
        content = await self._content()
        for attempt in range(self.retries):
            try:
                await self._send(content)
            except (EngineOverloaded, EngineFailed, httpx.ConnectError, httpx.ConnectTimeout) as error:
                pause_s = _pause_s(error, attempt)
                if self.stream.accepted is not None or pause_s is None:
                    raise
                log.info("engine_request_retried", engine=self.url, request_id=submit.request_id, pause_s=pause_s)
                await asyncio.sleep(pause_s)
            else:
                return
        await self._send(content)

    async def _send(self, content: bytes) -> None:
        """Send the request once, and deliver the answer. Raises the error of a server that does not begin it."""
        answer, submit = self.answer, self.submit
        headers = {"Content-Type": "application/json", "X-Request-Id": submit.request_id}
        if not self.dialect.keeps_alive:
            headers["Connection"] = "close"
        if submit.traceparent:
            headers["traceparent"] = submit.traceparent
        async with aclosing(await self._respond(content, headers)) as response:
            if response.status_code != 200:
                raise error_of_answer(
                    response.status_code, await _beginning(response), response.headers, self.clock.now()
                )
            self.stream.deliver(answer.accept())
            await self._relay(response)

    async def _respond(self, content: bytes, headers: dict[str, str]) -> httpx.Response:
        """Send the request and return the beginning of the answer. Raises httpx.HTTPError.

        A server that restarts closes its kept connections, and a request can be under way on one then. It is sent again
        only if the connection ended so soon that the server cannot have worked on the request for long. Otherwise a
        request that ends a server would end more of them than failover allows.
        """
        for _ in range(self.resends):
            attempt = _Attempt()
            try:
                return await self._send_once(content, headers, attempt)
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as error:
                if not attempt.is_on_closed_connection(error):
                    raise
                log.info("engine_request_resent", engine=self.url, request_id=self.submit.request_id)
        return await self._send_once(content, headers, _Attempt())

    async def _send_once(self, content: bytes, headers: dict[str, str], attempt: _Attempt) -> httpx.Response:
        request = self.http.build_request(
            "POST", self.url, content=content, headers=headers, extensions={"trace": attempt.note}
        )
        return await self.http.send(request, stream=True)

    async def _content(self) -> bytes:
        """Return the encoded body. Images are long, so they are copied in a thread."""
        answer, submit = self.answer, self.submit
        numbers = answer.prompt_ids, answer.num_left, answer.num_min_left
        if isinstance(submit, ChatSubmit):
            return await asyncio.to_thread(lambda: msgspec.json.encode(self.dialect.body(submit, *numbers)))
        return msgspec.json.encode(self.dialect.body(submit, *numbers))

    async def _relay(self, response: httpx.Response) -> None:
        """Deliver the events.

        After the answer, reading continues until the server ends the stream, so that the connection can serve another
        request, but for at most GRACE_S.
        """
        timeout = asyncio.timeout(None)
        try:
            async with timeout, aclosing(_events_of(response, self.on_bytes)) as events:
                async for event in events:
                    if self._take(event):
                        return
                    if self.answer.has_finished and timeout.when() is None:
                        timeout.reschedule(asyncio.get_running_loop().time() + GRACE_S)
        except TimeoutError:
            if not self.answer.has_finished:
                raise
        self._end()

    def _take(self, event: Event) -> bool:
        """Deliver one event, and return whether nothing that follows belongs to the answer."""
        answer = self.answer
        if event is DONE:
            self._end()
            return False
        piece = self.dialect.read(event)
        if isinstance(piece, PlatformError):
            raise piece
        tokens = answer.take(piece)
        if tokens is not None:
            self.stream.deliver(tokens)
        if answer.is_complete:
            self.stream.deliver(answer.end())
            return True
        if piece.is_last or (piece.is_usage and answer.has_finished):
            self._end()
        return False

    def _end(self) -> None:
        """End the stream. Raises EngineFailed if the server has sent no finish reason."""
        if self.stream.ended:
            return
        if not self.answer.has_finished:
            raise EngineFailed("the engine ended its answer early; send the request again")
        self.stream.deliver(self.answer.end())


class _Attempt:
    """Observer of a request that is sent once, by the events of httpcore's tracing."""

    def __init__(self) -> None:
        self._is_connection_new = False
        self._sent_at_s: float | None = None

    async def note(self, event: str, _info: object) -> None:
        if event.startswith("connection.connect"):
            self._is_connection_new = True
        elif event.endswith("send_request_body.complete"):
            self._sent_at_s = time.monotonic()

    def is_on_closed_connection(self, error: httpx.TransportError) -> bool:
        """Return whether the error is that of a kept connection that the server had closed, as far as can be known."""
        if self._is_connection_new or _is_malformed(error):
            return False
        return self._sent_at_s is None or time.monotonic() - self._sent_at_s <= RESEND_WITHIN_S


def _is_malformed(error: httpx.TransportError) -> bool:
    """Return whether the answer could not be parsed; httpcore has the same class for that and for the end of data."""
    return isinstance(error, httpx.RemoteProtocolError) and not str(error).startswith(DISCONNECTED)


def _pause_s(error: Exception, attempt: int) -> float | None:
    """Return the seconds before the next attempt, None if the request must not be sent again."""
    if isinstance(error, EngineRefused) or (isinstance(error, EngineFailed) and error.upstream is None):
        return None
    if isinstance(error, EngineOverloaded) and error.asks_to_wait:
        return error.retry_after_s if (error.retry_after_s or 0) <= MAX_PAUSE_S else None
    return random.uniform(0.5, 1.0) * FIRST_PAUSE_S * float(2**attempt)


async def _events_of(response: httpx.Response, on_bytes: Callable[[], None]) -> AsyncGenerator[Event]:
    """Yield the events of the body. Raises MalformedAnswer."""
    parser = EventParser()
    async with aclosing(content_of(response)) as content:
        async for piece in content:
            on_bytes()
            for event in parser.feed(piece):
                yield event
    for event in parser.end():
        yield event


async def _beginning(response: httpx.Response) -> bytes:
    """Return at most MAX_ERROR_BYTES of an error's body, as far as it can be read."""
    body = b""
    try:
        async with aclosing(content_of(response)) as content:
            async for piece in content:
                body += piece
                if len(body) > MAX_ERROR_BYTES:
                    break
    except (MalformedAnswer, httpx.HTTPError):
        return body[:MAX_ERROR_BYTES]
    return body[:MAX_ERROR_BYTES]
