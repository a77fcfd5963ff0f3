"""Open-loop load of many small requests: each is sent when it is due, even if answers are slow.

It has its own client, as in `moiety bench gateway`, since a general one costs more than the system under test. Answers
are whole documents with a Content-Length; a connection is reused once its answer has arrived.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_HEADER_END = b"\r\n\r\n"
_LENGTH = b"content-length:"
NO_ANSWER = 0  # the status where a connection broke


@dataclass(slots=True)
class Sent:
    """One request. Times are of `time.perf_counter`."""

    who: int  # whose it is, as the caller numbers them
    due_s: float
    sent_s: float = 0.0
    end_s: float = 0.0
    status: int = NO_ANSWER
    retry_after: bool = False  # whether the answer says when to come back
    code: str = ""  # of an error

    @property
    def latency_s(self) -> float:
        """Return the seconds since the request was due, so that delays of the client count too."""
        return self.end_s - self.due_s


class _Connection(asyncio.Protocol):
    def __init__(self, free: list[_Connection], on_end: Callable[[Sent], None]) -> None:
        self._free = free
        self._on_end = on_end
        self._received = bytearray()
        self._now: Sent | None = None
        self.is_closed = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def send(self, request: bytes, sent: Sent) -> None:
        self._now, sent.sent_s = sent, time.perf_counter()
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(_HEADER_END)
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        length = int(head.partition(_LENGTH)[2].split(b"\r\n", 1)[0])
        if len(self._received) < end + len(_HEADER_END) + length:
            return
        sent, self._now = self._now, None
        assert sent is not None, "an answer has its request"
        sent.status, sent.retry_after = int(head[9:12]), b"\r\nretry-after:" in head
        if sent.status >= 400:
            sent.code = _code_of(bytes(self._received[end + len(_HEADER_END) :]))
        self._received.clear()
        self._free.append(self)
        self._end(sent)

    def connection_lost(self, exc: Exception | None) -> None:
        self.is_closed = True
        if self._now is not None:
            self._end(self._now)

    def _end(self, sent: Sent) -> None:
        sent.end_s = time.perf_counter()
        self._on_end(sent)


def _code_of(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return ""


class OpenLoop:
    """Keep-alive connections to one address, one for each open request."""

    def __init__(self, host: str, port: int) -> None:
        self.address = host, port
        self._free: list[_Connection] = []
        self.num_open = 0
        self._idle = asyncio.Event()

    async def run(self, requests: Iterator[tuple[int, bytes]], rate: float, seconds: float) -> list[Sent]:
        """Send (whose, request) pairs at this rate for this time; return all, including those without an answer yet."""
        begin_s, done = time.perf_counter(), []
        for number in range(round(rate * seconds)):
            sent = Sent(0, begin_s + number / rate)
            delay_s = sent.due_s - time.perf_counter()
            if delay_s > 0:
                await asyncio.sleep(delay_s)
            sent.who, request = next(requests)
            done.append(sent)
            self.num_open += 1
            await self._send(request, sent)
        return done

    async def wait_idle(self, timeout_s: float) -> None:
        """Wait until every answer has arrived. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while self.num_open:
                self._idle.clear()
                await self._idle.wait()

    async def _send(self, request: bytes, sent: Sent) -> None:
        while self._free:
            connection = self._free.pop()
            if not connection.is_closed:
                break
        else:
            loop = asyncio.get_running_loop()
            try:
                _, connection = await loop.create_connection(
                    lambda: _Connection(self._free, self._on_end), *self.address
                )
            except OSError:
                sent.sent_s = sent.end_s = time.perf_counter()
                self._on_end(sent)
                return
        connection.send(request, sent)

    def _on_end(self, _: Sent) -> None:
        self.num_open -= 1
        self._idle.set()
