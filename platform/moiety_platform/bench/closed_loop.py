"""Closed-loop load over keep-alive connections: each connection sends its next request after the previous response.

It is a client of its own, because a general one costs several times what it measures. It parses only as much of
HTTP/1.1 as it needs to find the end of a response: Content-Length, or the last chunk of a chunked body.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

_HEADER_END = b"\r\n\r\n"
_LAST_CHUNK = b"0\r\n\r\n"
_EVENT = b"data: "


class UnexpectedAnswer(Exception):
    """The gateway answered with a status other than 200; the message holds the beginning of the response."""


@dataclass(slots=True)
class Tally:
    """Results of a run. Latencies are in seconds."""

    latencies_s: list[float] = field(default_factory=list)
    events: int = 0  # of streams
    duration_s: float = 0.0

    @property
    def requests_per_s(self) -> float:
        return len(self.latencies_s) / self.duration_s


class _BenchConnection(asyncio.Protocol):
    """Connection that sends requests one after another until there are no more, or the time is over."""

    def __init__(self, requests: Iterator[bytes], until_s: float, tally: Tally) -> None:
        self._requests = requests
        self._until_s = until_s
        self._tally = tally
        self._received = bytearray()
        self._body_end: int | None = None  # end of the response; -1: at its last chunk
        self._sent_s = 0.0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._send()

    def data_received(self, data: bytes) -> None:
        self._received += data
        if self._body_end is None:
            self._read_head()
        if self._body_end is not None and self._is_whole(self._body_end):
            self._tally.latencies_s.append(time.perf_counter() - self._sent_s)
            self._tally.events += self._received.count(_EVENT)
            self._received.clear()
            self._body_end = None
            self._send()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or UnexpectedAnswer("the gateway closed a connection"))

    def _send(self) -> None:
        now_s = time.perf_counter()
        request = next(self._requests, None) if now_s < self._until_s else None
        if request is None:
            if not self.done.done():
                self.done.set_result(None)
            self._transport.close()
            return
        self._sent_s = now_s
        self._transport.write(request)

    def _read_head(self) -> None:
        end = self._received.find(_HEADER_END)
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        if not head.startswith(b"http/1.1 200 "):
            text = bytes(self._received[:600]).decode(errors="replace")
            self.done.set_exception(UnexpectedAnswer(f"the gateway answered:\n{text}"))
            self._transport.abort()
            return
        _, found, rest = head.partition(b"content-length:")
        self._body_end = end + len(_HEADER_END) + int(rest.split(b"\r\n", 1)[0]) if found else -1

    def _is_whole(self, body_end: int) -> bool:
        return self._received.endswith(_LAST_CHUNK) if body_end < 0 else len(self._received) >= body_end


async def run_closed_loop(
    host: str, port: int, requests: Iterator[bytes], *, connections: int, seconds: float = float("inf")
) -> Tally:
    """Send the requests over `connections` connections, for `seconds` or until there are no more.

    Raises UnexpectedAnswer, or OSError if the gateway does not accept a connection.
    """
    tally, loop = Tally(), asyncio.get_running_loop()
    started_s = time.perf_counter()
    made = [
        await loop.create_connection(lambda: _BenchConnection(requests, started_s + seconds, tally), host, port)
        for _ in range(connections)
    ]
    await asyncio.gather(*(connection.done for _, connection in made))
    tally.duration_s = time.perf_counter() - started_s
    return tally
