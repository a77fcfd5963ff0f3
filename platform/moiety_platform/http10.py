"""Responses to HTTP/1.0 clients, which do not know the chunked coding (RFC 9112, 7.1)."""

from __future__ import annotations

from typing import Any

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle


class UnchunkedSend:
    """A response's `send` for an HTTP/1.0 client.

    A body of unknown length is sent as it is: the end of the connection ends it.
    """

    __slots__ = ("_cycle", "_is_length_known", "_send")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._is_length_known = True

    async def __call__(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._is_length_known = any(name.lower() == b"content-length" for name, _ in message["headers"])
            if not self._is_length_known:
                self._cycle.chunked_encoding = False
        elif not self._is_length_known:
            self._cycle.expected_content_length = len(message.get("body", b""))  # all that the cycle may expect
        await self._send(message)
