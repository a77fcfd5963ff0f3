"""One request over HTTP: put to the server, its stream read to the end, its failures told to the stream.

Owns the connection for as long as the request lives: leaving it closes it, which is how such a server learns that
nobody wants the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import aclosing
from typing import Any

import httpx
import msgspec
import structlog

from moiety_platform.engine_client.foreign.answer import Answer
from moiety_platform.engine_client.foreign.events import data_of_events
from moiety_platform.engine_client.foreign.failures import error_of_answer
from moiety_platform.engine_client.foreign.piece import BadAnswer, Dialect, Piece
from moiety_platform.engine_client.stream import EngineStream
from moiety_platform.errors import EngineFailed, PlatformError, Unavailable
from moiety_wire.messages import Submit

MAX_ERROR_BYTES = 64 * 1024
DONE = b"[DONE]"
PROTOCOL_VIOLATION = "engine_protocol_violation"

log = structlog.get_logger(__name__)

_decode = msgspec.json.Decoder().decode


class Exchange:
    """Delivers to one stream. Made for one call of `run`."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        url: str,
        dialect: Dialect,
        submit: Submit,
        answer: Answer,
        stream: EngineStream,
        on_break: Callable[[str], None],
    ) -> None:
        """`on_break` is told why the connection broke."""
        self._http = http
        self._url = url
        self._dialect = dialect
        self._submit = submit
        self._answer = answer
        self._stream = stream
        self._on_break = on_break

    async def run(self) -> None:
        """Ask, and deliver what comes until the end or a failure. May be cancelled at any time."""
        try:
            await self._ask()
        except PlatformError as error:
            self._stream.fail(error)
        except BadAnswer as error:
            message = f"the engine broke the protocol: {error}"
            self._stream.fail(EngineFailed(message, code=PROTOCOL_VIOLATION))
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._on_break(f"cannot be reached: {error}")
            self._stream.fail(Unavailable("the engine cannot be reached; try again shortly", retry_after_s=1))
        except httpx.HTTPError as error:
            if self._answer.has_finished:
                self._end()
                return
            self._on_break(f"the connection broke: {error or type(error).__name__}")
            self._stream.fail(EngineFailed("the engine was lost while it answered; send the request again"))
        except Exception:  # the root of a task, for which the stream waits: told there, logged whole
            log.exception("engine_exchange_failed", request_id=self._submit.request_id)
            self._stream.fail(EngineFailed("the engine's answer could not be read; send the request again"))

    async def _ask(self) -> None:
        answer, submit = self._answer, self._submit
        if answer.resume():
            self._stream.deliver(answer.accept())
            self._stream.deliver(answer.end())
            return
        body = self._dialect.body(submit, answer.prompt_ids, answer.num_left, answer.num_min_left)
        headers = {"Content-Type": "application/json", "X-Request-Id": submit.request_id}
        if not self._dialect.keeps_alive:
            headers["Connection"] = "close"
        if submit.traceparent:
            headers["traceparent"] = submit.traceparent
        async with self._http.stream("POST", self._url, content=msgspec.json.encode(body), headers=headers) as response:
            if response.status_code != 200:
                raise error_of_answer(
                    response.status_code, await _beginning(response), response.headers.get("retry-after")
                )
            self._stream.deliver(answer.accept())
            await self._relay(response)

    async def _relay(self, response: httpx.Response) -> None:
        """After the end it is read on until the server closes it, so that the connection can serve another request."""
        answer = self._answer
        async with aclosing(data_of_events(response.aiter_raw())) as events:
            async for data in events:
                if data == DONE:
                    self._end()
                    continue
                piece = self._read(data)
                tokens = answer.take(piece)
                if tokens is not None:
                    self._stream.deliver(tokens)
                if answer.is_complete:
                    self._stream.deliver(answer.end())
                    return
                if piece.is_last:
                    self._end()
        self._end()

    def _end(self) -> None:
        """The server has said all that it will."""
        if self._stream.ended:
            return
        if not self._answer.has_finished:
            raise EngineFailed("the engine broke off its answer; send the request again")
        self._stream.deliver(self._answer.end())

    def _read(self, data: bytes) -> Piece:
        try:
            event: Any = _decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadAnswer(f"an event is not JSON ({error})") from error
        if not isinstance(event, dict):
            raise BadAnswer("an event is no object")
        piece = self._dialect.read(event)
        if isinstance(piece, PlatformError):
            raise piece
        return piece


async def _beginning(response: httpx.Response) -> bytes:
    """Of the body of an error, enough to know it by."""
    body = b""
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_ERROR_BYTES:
            break
    return body[:MAX_ERROR_BYTES]
