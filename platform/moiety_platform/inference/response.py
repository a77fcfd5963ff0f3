"""The sending half of one HTTP exchange: a whole answer, or a stream of events, or an error in either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any

from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Scope, Send

from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import ErrorForm, error_headers
from moiety_platform.idempotency.key_store_client import KeyClaim
from moiety_platform.idempotency.store import KeptAnswer
from moiety_platform.request_head import id_headers, request_id_of

DISCONNECT_SIGNAL = "moiety.transfer"
"""Key in a request's `state` for the DisconnectSignal, which the server sets."""

SEND_WHOLE = "moiety.send_whole"
"""Where the server puts, into a request's `state`, what sends the request of a scope a status, headers and a body at
once, past ASGI's messages; it returns False where that cannot be, and has sent nothing."""
SendWhole = Callable[[Scope, int, Mapping[str, str], bytes], bool]

REPLAYED_HEADER = b"idempotent-replayed"
REPLAY_BYTES = 64 * 1024  # of a kept answer, at once
_KEPT_HEADERS = "x-moiety-"  # what else the answers say of themselves is of their time

_JSON_HEADERS: list[tuple[bytes, bytes]] = [(b"content-type", b"application/json")]
_STREAM_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"x-accel-buffering", b"no"),
]


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

    def __init__(self, transfer: DisconnectSignal) -> None:
        self._disconnect = transfer
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


class HttpResponse:
    """Owned by the exchange; sends one answer. Sending to a client that has left raises ClientDisconnected."""

    def __init__(self, send: Send, scope: Scope, errors: ErrorForm) -> None:
        self._raw_send = send
        self._scope = scope
        self._send_whole: SendWhole | None = scope["state"].get(SEND_WHOLE)
        self.transfer = DisconnectSignal.of(scope["state"])
        self.errors = errors  # an answer may have its own once it streams
        self._request_id = request_id_of(scope)
        self._streaming = False
        self._in_pieces = False
        self.headers: dict[str, str] = {}  # of an answer; an error has its own
        self.claim: KeyClaim | None = None  # what the answer is kept under; an error is not kept

    async def whole(self, status: int, body: bytes) -> None:
        """A whole answer."""
        await self._keep(status, _JSON_HEADERS, body)
        await self._whole(status, body, self.headers)

    async def pieces(self, pieces: Iterable[bytes]) -> None:
        """A whole answer that is made while it is sent, and so is never in memory all at once."""
        self._in_pieces = True
        await self._send(_start(200, _JSON_HEADERS + _encode(self.headers)))
        for piece in pieces:
            self._note(piece)
            await self._send(_body(piece, more=True))
            await asyncio.sleep(0)  # sending waits for the connection only; others get their turn too
        await self._keep(200, _JSON_HEADERS, b"")
        await self._send(_body(b"", more=False))

    async def stream(self, data: bytes) -> None:
        """Send events; the first ones start the answer. Returns when the connection can take more."""
        if not self._streaming:
            self._streaming = True
            await self._send(_start(200, _STREAM_HEADERS + _encode(self.headers)))
        self._note(data)
        await self._send(_body(data, more=True))

    async def end_stream(self, data: bytes) -> None:
        """The last events of an answer that is whole."""
        await self._keep(200, _STREAM_HEADERS, data)
        await self._send(_body(data, more=False))

    async def replay(self, answer: KeptAnswer) -> None:
        """Send the answer of an earlier request, byte for byte."""
        fields = _encode({**answer.headers, "content-length": str(len(answer.body))})
        await self._send(_start(answer.status, [*fields, (REPLAYED_HEADER, b"true")]))
        for start in range(0, len(answer.body), REPLAY_BYTES):
            await self._send(_body(answer.body[start : start + REPLAY_BYTES], more=True))
        await self._send(_body(b"", more=False))

    def _note(self, data: bytes) -> None:
        if self.claim is not None:
            self.claim.note(data)

    async def _keep(self, status: int, fields: list[tuple[bytes, bytes]], last: bytes) -> None:
        """Keep what was sent and what is to be sent last, so that whoever has an answer finds it kept."""
        if self.claim is not None:
            self.claim.note(last)
            headers = {name.decode(): value.decode() for name, value in fields}
            own = {name: value for name, value in self.headers.items() if name.startswith(_KEPT_HEADERS)}
            await self.claim.keep(status, headers | own)

    async def _whole(self, status: int, body: bytes, headers: dict[str, str]) -> None:
        if self._send_whole is not None and not self.transfer.has_left:
            ids = id_headers(self._scope["path"], self._request_id)
            if self._send_whole(self._scope, status, {"content-type": "application/json", **headers, **ids}, body):
                return
        fields = [*_JSON_HEADERS, (b"content-length", b"%d" % len(body))]
        await self._send(_start(status, fields + _encode(headers)))
        await self._send(_body(body, more=False))

    async def _send(self, event: HTTPResponseStartEvent | HTTPResponseBodyEvent) -> None:
        """Returns when the connection can take more."""
        if self.transfer.has_left:
            raise ClientDisconnected
        await self._raw_send(event)

    async def fail(self, error: PlatformError) -> None:
        """An error answer, or an error event if the answer has begun; the end of the connection where neither fits."""
        if self._in_pieces:
            self.transfer.drop()
        elif self._streaming:
            await self._send(_body(self.errors.event(error, self._request_id), more=False))
        else:
            body = self.errors.body(error, self._request_id)
            await self._whole(self.errors.status(error), body, error_headers(error))


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> HTTPResponseStartEvent:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": data, "more_body": more}
