"""Connections of a server that stops: what a client sends meanwhile is answered, and idle connections are closed."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from moiety_platform.bootstrap.server import GatewayServer
from moiety_platform.connections import REUSE_S, ConnectionLimits
from moiety_platform.http_server import HttpServer
from moiety_platform.listening import bind
from moiety_platform.settings import GatewaySettings

REQUEST = b"POST /a HTTP/1.1\r\nHost: t\r\nContent-Length: 5\r\n\r\nhello"
DEADLINE_S = 30.0
DRAIN_S = 60
REUSE_PARTS = 10

kinds = pytest.mark.parametrize("kind", [HttpServer, GatewayServer])


@dataclass
class Served:
    """A server that runs. A response starts at once, and ends when `go` is set."""

    server: HttpServer
    address: tuple[str, int]
    task: asyncio.Task[None]
    go: asyncio.Event = field(default_factory=asyncio.Event)
    started: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(0))
    clients: list[Client] = field(default_factory=list)

    async def stop(self) -> None:
        """Begin the stop, and return once it has told the open connections."""
        self.server.request_exit()
        await until(lambda: self.server.limited.is_draining)
        await asyncio.sleep(0)


@dataclass
class Client:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    def send(self, data: bytes = REQUEST) -> None:
        self.writer.write(data)

    async def head(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readuntil(b"\r\n\r\n")

    async def answer(self) -> bytes:
        """Return the head of a response whose body is `done`."""
        head = await self.head()
        assert await self.body() == b"done"
        return head

    async def body(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.readexactly(4)

    async def rest(self) -> bytes:
        async with asyncio.timeout(DEADLINE_S):
            return await self.reader.read()


@asynccontextmanager
async def serving(kind: type[HttpServer], drain_s: int = DRAIN_S) -> AsyncIterator[Served]:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        while scope["path"] != "/unread" and (await receive())["more_body"]:
            pass
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"4")]})
        served.started.release()
        await served.go.wait()
        await send({"type": "http.response.body", "body": b"done"})

    server = kind(app, drain_s, ConnectionLimits.of(GatewaySettings(header_timeout_s=2 * DEADLINE_S)))
    listener = bind("127.0.0.1", 0)
    address = listener.getsockname()[:2]
    served = Served(server, address, asyncio.create_task(server.serve([listener])))
    served.go.set()
    await until(lambda: server.started)
    try:
        yield served
    finally:
        if not server.should_exit:
            server.request_exit()
        async with asyncio.timeout(DEADLINE_S):
            await served.task
        for client in served.clients:
            client.writer.close()
            await client.writer.wait_closed()


async def connected(served: Served) -> Client:
    """Return a connection that the server has accepted."""
    known = len(served.server.server_state.connections)
    client = Client(*await asyncio.open_connection(*served.address))
    served.clients.append(client)
    await until(lambda: len(served.server.server_state.connections) > known)
    return client


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - a server has no event for it
            await asyncio.sleep(0.001)


def announces_end(head: bytes) -> bool:
    return b"connection: close" in head.lower()


@kinds
async def test_a_request_on_a_kept_connection_of_a_stopping_server_is_answered_as_the_last(
    kind: type[HttpServer],
) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        client.send()
        assert not announces_end(await client.answer())
        await served.stop()
        client.send()
        assert announces_end(await client.answer())
        assert await client.rest() == b""


@kinds
@pytest.mark.parametrize("sent", [0, 1, 20, len(REQUEST) - 6, len(REQUEST) - 3])
async def test_a_request_that_is_sent_in_part_when_the_server_stops_is_answered(
    kind: type[HttpServer], sent: int
) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        client.send(REQUEST[:sent])
        await asyncio.sleep(0.05)  # the server has read it
        await served.stop()
        client.send(REQUEST[sent:])
        assert announces_end(await client.answer())
        assert await client.rest() == b""


@kinds
async def test_a_response_whose_head_is_sent_is_followed_by_one_that_announces_the_end(kind: type[HttpServer]) -> None:
    """A client takes the connection for reusable as the head said nothing, and uses it at once."""
    async with serving(kind) as served:
        client = await connected(served)
        served.go.clear()
        client.send()
        assert not announces_end(await client.head())
        await served.stop()
        served.go.set()
        assert await client.body() == b"done"
        await asyncio.sleep(0.2)
        client.send()
        assert announces_end(await client.answer())
        assert await client.rest() == b""


@kinds
async def test_a_request_that_waits_behind_another_is_answered_when_the_server_stops(kind: type[HttpServer]) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        served.go.clear()
        client.send(REQUEST + REQUEST)
        await served.started.acquire()
        await served.stop()
        served.go.set()
        assert not announces_end(await client.answer())
        assert announces_end(await client.answer())
        assert await client.rest() == b""


@kinds
async def test_idle_connections_are_closed_and_do_not_hold_up_the_stop(kind: type[HttpServer]) -> None:
    async with serving(kind) as served:
        idle = await connected(served)
        idle.send()
        await idle.answer()
        silent = await connected(served)
        began = time.monotonic()
        await served.stop()
        assert [await one.rest() for one in (idle, silent)] == [b"", b""]
        assert time.monotonic() - began >= REUSE_S / 2, "a client that uses its connection often is answered"
        async with asyncio.timeout(DEADLINE_S):  # far less than the time to drain
            await served.task


@kinds
async def test_a_head_that_is_never_completed_is_refused_and_does_not_hold_up_the_stop(kind: type[HttpServer]) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        client.send(REQUEST[:10])
        await asyncio.sleep(0.05)  # the server has read it
        await served.stop()
        answer = await client.rest()
        assert answer.startswith(b"HTTP/1.1 408 ") and announces_end(answer)
        async with asyncio.timeout(DEADLINE_S):  # far less than the time to drain
            await served.task


@kinds
@pytest.mark.parametrize("sent", [REQUEST[:1], b"\r\n"])
async def test_a_head_that_begins_after_the_stop_does_not_hold_it_up(kind: type[HttpServer], sent: bytes) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        client.send()
        await client.answer()
        await served.stop()
        client.send(sent)
        answer = await client.rest()
        assert (answer == b"") if sent.isspace() else answer.startswith(b"HTTP/1.1 408 ")
        async with asyncio.timeout(DEADLINE_S):  # far less than the time to drain
            await served.task


@kinds
@pytest.mark.parametrize("goes_on", [False, True])
async def test_the_body_of_an_answered_request_does_not_hold_up_the_stop(kind: type[HttpServer], goes_on: bool) -> None:
    async def send_on() -> None:
        for _ in range(REUSE_PARTS * 4):
            client.send(b"x" * 1000)
            await asyncio.sleep(REUSE_S / REUSE_PARTS)

    async with serving(kind) as served:
        client = await connected(served)
        client.send(b"POST /unread HTTP/1.1\r\nHost: t\r\nContent-Length: 1000000\r\n\r\nhello")
        await client.answer()
        await served.stop()
        sending = asyncio.create_task(send_on()) if goes_on else None
        with contextlib.suppress(ConnectionResetError):  # the client sends to a closed connection
            assert await client.rest() == b""
        async with asyncio.timeout(DEADLINE_S):  # far less than the time to drain
            await served.task
        if sending is not None:
            sending.cancel()


@kinds
async def test_a_server_without_time_to_drain_closes_idle_connections_at_once(kind: type[HttpServer]) -> None:
    async with serving(kind, drain_s=0) as served:
        client = await connected(served)
        client.send()
        await client.answer()
        assert served.server.limited.reuse_s == 0
        await served.stop()
        assert await client.rest() == b""


@kinds
async def test_a_second_request_to_stop_waits_for_no_connection(kind: type[HttpServer]) -> None:
    async with serving(kind) as served:
        client = await connected(served)
        client.send(REQUEST[:10])
        await asyncio.sleep(0.05)
        await served.stop()
        served.server.request_exit()
        async with asyncio.timeout(DEADLINE_S):
            await served.task
        assert await client.rest() == b""
