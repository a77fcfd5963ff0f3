"""Keep-alive events of streamed answers: proxies and clients may take a long silence for a dead connection."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType

from moiety_platform.inference.response import ClientDisconnected, HttpResponse

COMMENT = b": keep-alive\n\n"  # event stream parsers ignore comments


class KeepAlive:
    """Context that sends an event whenever the client was sent nothing for an interval.

    The first event may begin the answer: then status 200 and the headers are sent before the first token, and a later
    failure is an event of the stream. Without an interval (0) it does nothing.
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
            self._wait(self._interval_s)

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
