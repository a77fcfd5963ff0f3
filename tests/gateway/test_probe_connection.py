"""The kept connection for probes of an external engine, before servers that answer in every valid way."""

from __future__ import annotations

import asyncio
import gzip
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from moiety_platform.engine_addresses import ExternalKind
from moiety_platform.external_engines import probe_connection
from moiety_platform.external_engines.metrics import ExternalMetrics, read_metrics
from moiety_platform.external_engines.probe_connection import (
    MAX_ANSWER_BYTES,
    MAX_HEAD_BYTES,
    InvalidBody,
    ProbeConnection,
    ProbeFailed,
)

OK = b"HTTP/1.1 200 OK\r\n"
GZIPPED = gzip.compress(b"hello")
TLS = ssl.create_default_context()
Answer = Callable[[bytes, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def answering(answer: Answer) -> AsyncIterator[tuple[ProbeConnection, list[bytes], list[int]]]:
    """Yield a connection to a server, the heads of its requests, and the number of requests of each connection."""
    heads: list[bytes] = []
    counts: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        number = len(counts)
        counts.append(0)
        try:
            while not writer.is_closing():
                heads.append(await reader.readuntil(b"\r\n\r\n"))
                counts[number] += 1
                await answer(heads[-1], writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    connection = ProbeConnection(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/base", TLS)
    try:
        yield connection, heads, counts
    finally:
        connection.close()
        server.close()


def says(data: bytes, *, closes: bool = False) -> Answer:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        if closes:
            writer.close()

    return answer


async def test_requests_share_one_connection_and_carry_the_headers() -> None:
    async with answering(says(OK + b"Content-Length: 2\r\n\r\nhi")) as (connection, heads, counts):
        for key in ("Bearer one", "Bearer two"):
            connection.use_headers({"Authorization": key})
            answer = await connection.get("/health")
            assert (answer.status, answer.body) == (200, b"hi")
        assert counts == [2]
        assert heads[0].startswith(b"GET /base/health HTTP/1.1\r\nHost: 127.0.0.1:")
        assert [b"Authorization: Bearer one\r\n" in head for head in heads] == [True, False]


@pytest.mark.parametrize(
    ("data", "closes", "status", "body"),
    [
        (OK + b"Transfer-Encoding: chunked\r\n\r\n2\r\nhe\r\n3\r\nllo\r\n0\r\n\r\n", False, 200, b"hello"),
        (OK + b"\r\nhello", True, 200, b"hello"),
        (OK + b"Connection: close\r\nContent-Length: 5\r\n\r\nhello", False, 200, b"hello"),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, 204, b""),
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\n\r\n", False, 503, b""),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: %d\r\n\r\n" % len(GZIPPED) + GZIPPED, False, 200, b"hello"),
    ],
    ids=["chunked", "until-close", "close", "no-content", "busy", "gzip"],
)
async def test_every_form_of_answer_is_read(data: bytes, closes: bool, status: int, body: bytes) -> None:
    async with answering(says(data, closes=closes)) as (connection, _, _counts):
        for _ in range(2):
            answer = await connection.get("/health")
            assert (answer.status, answer.body) == (status, body)


async def test_a_kept_connection_that_ended_is_opened_again() -> None:
    async def answer(head: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(OK + b"Content-Length: 0\r\n\r\n")
        writer.close()  # without a word, as servers do that close idle connections

    async with answering(answer) as (connection, _, counts):
        for _ in range(3):
            assert (await connection.get("/health")).status == 200
        assert counts == [1, 1, 1]


async def test_the_end_of_an_idle_connection_is_told() -> None:
    dropped = asyncio.Event()
    async with answering(says(OK + b"Content-Length: 0\r\n\r\n", closes=True)) as (connection, _, _counts):
        connection._on_dropped = dropped.set
        await connection.get("/health")
        async with asyncio.timeout(30):
            assert await dropped.wait()


async def test_a_second_answer_changes_nothing_and_ends_the_connection() -> None:
    second = b"HTTP/1.1 503 Busy\r\nContent-Length: 3\r\n\r\nbad"
    async with answering(says(OK + b"Content-Length: 2\r\n\r\nok" + second)) as (connection, _, counts):
        for _ in range(2):
            answer = await connection.get("/health")
            assert (answer.status, answer.body, answer.headers) == (200, b"ok", {"content-length": "2"})
        assert counts == [1, 1]


async def test_an_address_that_does_not_answer_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, tried = asyncio.get_running_loop(), list[str]()
    connect = loop.create_connection

    async def addresses(*_: object, **__: object) -> list[tuple[object, ...]]:
        return [(0, 0, 0, "", (address, 0)) for address in ("192.0.2.1", "127.0.0.1")]

    async def connect_or_hang(make: object, host: str, port: int, **options: object) -> object:
        tried.append(host)
        if host == "192.0.2.1":
            await asyncio.Event().wait()
        return await connect(make, host, port, ssl=None)

    monkeypatch.setattr(probe_connection, "ADDRESS_TIMEOUT_S", 0.05)
    monkeypatch.setattr(loop, "getaddrinfo", addresses)
    async with answering(says(OK + b"Connection: close\r\nContent-Length: 2\r\n\r\nok")) as (connection, _, _counts):
        monkeypatch.setattr(loop, "create_connection", connect_or_hang)
        for _ in range(2):
            assert (await connection.get("/health")).body == b"ok"
    assert tried == ["192.0.2.1", "127.0.0.1", "127.0.0.1"]  # the good one is tried first afterwards


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"", ProbeFailed),
        (b"SSH-2.0-server\r\n", ProbeFailed),
        (OK + b"Content-Length: 9\r\n\r\nhello", ProbeFailed),
        (OK + b"Content-Encoding: br\r\nContent-Length: 5\r\n\r\nhello", InvalidBody),
        (OK + b"Content-Encoding: gzip\r\nContent-Length: 5\r\n\r\nhello", InvalidBody),
        (OK + b"\r\n" + bytes(MAX_ANSWER_BYTES + 1), InvalidBody),
        (OK + b"a:b\r\n" * MAX_HEAD_BYTES, ProbeFailed),
        (OK + b"a: " + b"x" * 2 * MAX_HEAD_BYTES, ProbeFailed),
        (b"HTTP/1.1 100 Continue\r\na:b\r\n\r\n" * MAX_HEAD_BYTES, ProbeFailed),
        (OK + b"Transfer-Encoding: chunked\r\n\r\n0\r\n" + b"a:b\r\n" * MAX_HEAD_BYTES, ProbeFailed),
    ],
    ids=[
        *("nothing", "not-http", "cut", "unknown-encoding", "not-gzip", "too-long"),
        *("many-headers", "long-header", "many-heads", "many-trailers"),
    ],
)
async def test_invalid_answers_are_errors(data: bytes, error: type[Exception]) -> None:
    async with answering(says(data, closes=True)) as (connection, _, _counts):
        with pytest.raises(error):
            await connection.get("/health")


async def test_a_server_that_does_not_listen_cannot_be_reached() -> None:
    async with answering(says(b"")) as (connection, _, _counts):
        pass
    with pytest.raises(ProbeFailed):
        await connection.get("/health")


def test_a_longer_name_and_a_comment_are_not_the_series() -> None:
    text = (
        "# vllm:num_requests_running 9\n"
        "vllm:num_requests_running_other 8\n"
        'vllm:num_requests_running{engine="0"} 3.0\r\n'
        'vllm:num_requests_running{engine="1"} 4.0'
    )
    assert read_metrics(ExternalKind.VLLM, text) == ExternalMetrics(num_running=7)
