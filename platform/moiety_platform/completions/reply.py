"""The sending half of one HTTP exchange: a whole answer, or a stream of events, or an error in either."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable

from litestar.types import HTTPResponseBodyEvent, HTTPResponseStartEvent, Send

from moiety_platform.completions.disconnect import ClientDisconnected
from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import ErrorForm, error_headers

ABORT_CONNECTION = "moiety.abort_connection"
"""Where the server puts, into a request's `state`, what drops the request's connection at once."""

_STREAM_HEADERS: list[tuple[bytes, bytes]] = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]


class Reply:
    """Owned by the exchange; sends one answer. A client that takes nothing for `timeout_s` counts as gone: its
    connection is dropped, and the send raises ClientDisconnected."""

    def __init__(
        self, send: Send, timeout_s: float, abort: Callable[[], None] | None, errors: ErrorForm, request_id: str
    ) -> None:
        self._raw_send = send
        self._timeout_s = timeout_s
        self._abort = abort
        self._errors = errors
        self._request_id = request_id
        self._streaming = False
        self._in_pieces = False
        self.headers: dict[str, str] = {}  # of an answer; an error has its own

    async def whole(self, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
        """A whole answer; with `headers` in place of its own."""
        fields = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
        await self._send(_start(status, fields + _encode(self.headers if headers is None else headers)))
        await self._send(_body(body, more=False))

    async def pieces(self, pieces: Iterable[bytes]) -> None:
        """A whole answer that is made while it is sent, and so is never in memory all at once."""
        self._in_pieces = True
        await self._send(_start(200, [(b"content-type", b"application/json"), *_encode(self.headers)]))
        for piece in pieces:
            await self._send(_body(piece, more=True))
            await asyncio.sleep(0)  # sending waits for the connection only; others get their turn too
        await self._send(_body(b"", more=False))

    async def stream(self, data: bytes) -> None:
        """Send events; the first ones start the answer. Returns when the connection can take more."""
        if not self._streaming:
            self._streaming = True
            await self._send(_start(200, _STREAM_HEADERS + _encode(self.headers)))
        await self._send(_body(data, more=True))

    async def end_stream(self, data: bytes) -> None:
        await self._send(_body(data, more=False))

    async def _send(self, event: HTTPResponseStartEvent | HTTPResponseBodyEvent) -> None:
        """Returns when the connection can take more."""
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._raw_send(event)
        except TimeoutError as exc:
            if self._abort is not None:
                self._abort()  # closing would wait for the client to take what was sent
            raise ClientDisconnected from exc

    async def fail(self, error: PlatformError) -> None:
        """An error answer, or an error event if the answer has begun; the end of the connection where neither fits."""
        if self._in_pieces:
            if self._abort is not None:
                self._abort()
        elif self._streaming:
            await self.end_stream(self._errors.event(error, self._request_id))
        else:
            body = self._errors.body(error, self._request_id)
            await self.whole(self._errors.status(error), body, error_headers(error))


def _encode(headers: dict[str, str]) -> list[tuple[bytes, bytes]]:
    return [(name.lower().encode(), value.encode()) for name, value in headers.items()]


def _start(status: int, headers: list[tuple[bytes, bytes]]) -> HTTPResponseStartEvent:
    return {"type": "http.response.start", "status": status, "headers": headers}


def _body(data: bytes, *, more: bool) -> HTTPResponseBodyEvent:
    return {"type": "http.response.body", "body": data, "more_body": more}
