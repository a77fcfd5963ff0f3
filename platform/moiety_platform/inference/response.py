"""The response to one HTTP request, and the disconnect of its client."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from types import TracebackType
from typing import Any

import structlog
from litestar.types import HTTPResponseBodyEvent, Scope, Send

from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import ErrorForm, error_headers
from moiety_platform.idempotency.key_store_client import KeyClaim
from moiety_platform.idempotency.store import StoredAnswer
from moiety_platform.request_head import id_headers, request_id_of

DISCONNECT_SIGNAL = "moiety.disconnect"
"""Key in a request's `state` for the DisconnectSignal, which the server sets."""

SEND_WHOLE = "moiety.send_whole"
"""Key in a request's `state` for the server's function that sends a complete response without ASGI messages.

The function returns False, and has sent nothing, where ASGI messages must send the response.
"""
SendWhole = Callable[[Scope, int, Mapping[str, str], bytes], bool]

KEEP_ALIVE_COMMENT = b": keep-alive\n\n"  # event stream parsers ignore comments
REPLAYED_HEADER = b"idempotent-replayed"
REPLAY_BYTES = 64 * 1024  # of a stored answer, per message
STREAM_ID = "stream-id"  # of a stored answer that is a stream stored elsewhere, and no header of its replay
_KEPT_HEADERS = "x-moiety-"  # prefix of the headers that are stored; rate limits and dates are not

_JSON_HEADERS: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
_STREAM_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


log = structlog.get_logger(__name__)


class ClientDisconnected(Exception):  # no PlatformError: there is no client to answer
    """The client closed the connection."""


class DisconnectSignal:
    """Disconnect signal of one connection's client.

    Owned by the connection, which triggers it. At most one waiter is supported.
    """

    def __init__(self, drop: Callable[[], None] = lambda: None) -> None:
        """Create a signal. `drop` closes the connection at once and discards unsent data."""
        self.drop = drop
        self.has_left = False
        self.on_left: Callable[[], None] | None = None

    def note(self) -> None:
        """Signal that the client disconnected."""
        self.has_left = True
        if self.on_left is not None:
            self.on_left()

    @classmethod
    def of(cls, state: dict[str, Any]) -> DisconnectSignal:
        """Return the signal of a request. If the server sets none, return one that never triggers."""
        found = state.get(DISCONNECT_SIGNAL)
        return found if isinstance(found, DisconnectSignal) else cls()


class WatchingForDisconnect:
    """Context that is cancelled when the client disconnects, and then raises ClientDisconnected."""

    __slots__ = ("_disconnect", "_is_gone", "_task")

    def __init__(self, disconnect: DisconnectSignal) -> None:
        self._disconnect = disconnect
        self._task: asyncio.Task[Any] | None = None
        self._is_gone = False

    def __enter__(self) -> None:
        if self._disconnect.has_left:
            raise ClientDisconnected
        self._task = asyncio.current_task()
        self._disconnect.on_left = self._leave

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._disconnect.on_left = None
        is_ours = isinstance(exc, asyncio.CancelledError) and self._is_gone
        if is_ours and self._task is not None and self._task.uncancel() == 0:
            raise ClientDisconnected from exc

    def _leave(self) -> None:
        if self._task is not None and not self._is_gone:
            self._is_gone = True
            self._task.cancel()


class KeepAlive:
    """Events of a streamed answer that is silent: proxies and clients may take a long silence for a dead connection.

    While the context is open, an event is sent whenever the client was sent nothing for an interval. The first one may
    begin the answer: then status 200 and the headers are sent before the first token, and a later failure is an event
    of the stream. Without an interval (0) nothing is sent.
    """

    __slots__ = ("_event", "_interval_s", "_on_sent", "_response", "_task", "_timer")

    def __init__(self, response: HttpResponse, interval_s: float, event: bytes, on_sent: Callable[[], None]) -> None:
        self._response = response
        self._interval_s = interval_s
        self._event = event
        self._on_sent = on_sent
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> None:
        if self._interval_s:
            self._response.last_sent_s = time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._look)

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._interval_s = 0.0
        if self._task is not None:
            await self._task  # it may wait for a client that reads slowly, as the rest of the answer would

    def _wait(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._look)

    def _look(self) -> None:
        silent_s = time.monotonic() - self._response.last_sent_s
        if silent_s < self._interval_s:
            self._wait(self._interval_s - silent_s)
        else:
            self._task = asyncio.get_running_loop().create_task(self._send())

    async def _send(self) -> None:
        self._on_sent()
        try:
            await self._response.keep_alive(self._event)
        except ClientDisconnected:
            return
        if self._interval_s:
            self._wait(self._interval_s)


class HttpResponse:
    """Response to one request: a complete answer, a stream of events, or an error.

    Owned by the pipeline. Every method raises ClientDisconnected if the client has disconnected.
    """

    def __init__(
        self,
        send: Send,
        scope: Scope,
        errors: ErrorForm,
        own_headers: Callable[[Mapping[str, str]], dict[str, str]] = dict,
    ) -> None:
        """Create the response. `own_headers` adds an API's own headers."""
        self._raw_send = send
        self._scope = scope
        self._own_headers = own_headers
        self._send_whole: SendWhole | None = scope["state"].get(SEND_WHOLE)
        self.disconnect = DisconnectSignal.of(scope["state"])
        self.errors = errors  # a streamed answer may have its own
        self.request_id = request_id_of(scope)
        self._streaming = False
        self._in_pieces = False
        self.headers: dict[str, str] = {}  # of an answer; an error has its own
        self.last_sent_s = 0.0  # monotonic time of the last part of a stream
        self.claim: KeyClaim | None = None  # the idempotency key that the answer is stored under; errors are not stored

    async def release_claim(self) -> None:
        """Release the idempotency key if no answer was stored under it. Idempotent, and never raises.

        If the database refuses, the key is left to expire.
        """
        if self.claim is not None:
            try:
                await self.claim.release()
            except Exception:  # the request's own error is still to be sent
                log.exception(
                    "idempotency_key_not_released",
                    request_id=self.request_id,
                    advice="none needed: the claim expires by itself, and a repeated request waits until then",
                )

    async def whole(self, status: int, body: bytes) -> None:
        """Send a complete answer."""
        await self._keep(status, _JSON_HEADERS, body)
        await self._whole(status, body, self.headers)

    async def pieces(self, pieces: Iterable[bytes]) -> None:
        """Send a complete answer that is made while it is sent, so that it is never in memory as a whole."""
        self._in_pieces = True
        await self._start(200, _JSON_HEADERS, self.headers)
        for piece in pieces:
            if self.claim is not None:
                self.claim.note(piece)
            await self._send(_body(piece, more=True))
            await asyncio.sleep(0)  # sending waits for the connection only; let other tasks run
        await self._keep(200, _JSON_HEADERS, b"")
        await self._send(_body(b"", more=False))

    async def stream(self, data: bytes) -> None:
        """Send events; the first ones start the answer. Returns when the connection can take more."""
        if not self._streaming:
            self._streaming = True
            await self._start(200, _STREAM_HEADERS, self.headers)
        if self.claim is not None:
            self.claim.note(data)
        if self.disconnect.has_left:
            raise ClientDisconnected
        self.last_sent_s = time.monotonic()
        await self._raw_send({"type": "http.response.body", "body": data, "more_body": True})

    async def keep_alive(self, event: bytes) -> None:
        """Send an event that is not part of the answer, and is not stored with it. It may start the answer."""
        if not self._streaming:
            self._streaming = True
            await self._start(200, _STREAM_HEADERS, self.headers)
        self.last_sent_s = time.monotonic()
        await self._send(_body(event, more=True))

    async def end_stream(self, data: bytes) -> None:
        """Send the last events of a complete answer."""
        if self.claim is not None:
            await self._keep(200, _STREAM_HEADERS, data)
        if self.disconnect.has_left:
            raise ClientDisconnected
        await self._raw_send({"type": "http.response.body", "body": data, "more_body": False})

    async def replay(self, answer: StoredAnswer) -> None:
        """Send the answer of an earlier request, byte for byte."""
        length = str(len(answer.body))
        await self._start(answer.status, [(REPLAYED_HEADER, b"true")], {**answer.headers, "content-length": length})
        for start in range(0, len(answer.body), REPLAY_BYTES):
            await self._send(_body(answer.body[start : start + REPLAY_BYTES], more=True))
        await self._send(_body(b"", more=False))

    async def resume(self, answer: StoredAnswer, events: AsyncGenerator[bytes]) -> None:
        """Send the stored stream that is the answer of an earlier request."""
        headers = {name: value for name, value in answer.headers.items() if name != STREAM_ID}
        self.headers = {**headers, REPLAYED_HEADER.decode(): "true"}
        async with aclosing(events):
            async for data in events:
                await self.stream(data)
        await self._send(_body(b"", more=False))

    async def report(self, error: PlatformError) -> None:
        """Send an error to a client that may have stopped reading. Its idempotency key is free before."""
        await self.release_claim()
        with contextlib.suppress(ClientDisconnected):
            await self.fail(error)

    async def fail(self, error: PlatformError) -> None:
        """Send an error, as an event if the answer has begun; close the connection where neither is possible."""
        if self._in_pieces:
            self.disconnect.drop()
        elif self._streaming:
            await self._send(_body(self.errors.event(error, self.request_id), more=False))
        else:
            body = self.errors.body(error, self.request_id)
            await self._whole(self.errors.status(error), body, error_headers(error))

    async def _keep(self, status: int, fields: list[tuple[bytes, bytes]], last: bytes) -> None:
        """Store what was sent and the last part, before that is sent: a client with the answer finds it stored."""
        if self.claim is not None:
            self.claim.note(last)
            headers = {name.decode(): value.decode() for name, value in fields}
            own = {name: value for name, value in self.headers.items() if name.startswith(_KEPT_HEADERS)}
            await self.claim.keep(status, headers | own)

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self._send_whole is not None and not self.disconnect.has_left:
            ids = id_headers(self._scope["path"], self.request_id)
            if self._send_whole(
                self._scope, status, {"content-type": "application/json", **self._own_headers(headers), **ids}, body
            ):
                return
        await self._start(status, [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))], headers)
        await self._send(_body(body, more=False))

    async def _start(self, status: int, fields: list[tuple[bytes, bytes]], headers: dict[str, str]) -> None:
        named = {**self._own_headers(headers), **id_headers(self._scope["path"], self.request_id)}
        encoded = [*fields]
        for name, value in named.items():
            encoded.append((name.lower().encode(), value.encode("latin-1")))
        if self.disconnect.has_left:
            raise ClientDisconnected
        await self._raw_send({"type": "http.response.start", "status": status, "headers": encoded})

    async def _send(self, event: HTTPResponseBodyEvent) -> None:
        """Send a part of the body. Returns when the connection can take more."""
        if self.disconnect.has_left:
            raise ClientDisconnected
        await self._raw_send(event)


def _body(data: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": data, "more_body": more}
