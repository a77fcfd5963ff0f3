"""Limits of bytes and time before a connection has a request: beyond them, the client gets an error and is
disconnected."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest
import uvloop

from moiety_platform.connections import CoalescingTransport
from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import ModelCard

from .conftest import NewCard, RunningGateway, StartGateway, Until

CHAT = "/v1/chat/completions"
MESSAGES = "/v1/messages"
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}
HASTY: dict[str, Any] = {"header_timeout_s": 0.2, "body_timeout_s": 0.2, "keep_alive_s": 1}
DEADLINE_S = 60.0


@asynccontextmanager
async def connect(gateway: RunningGateway) -> AsyncIterator[tuple[Any, ...]]:
    reader, writer = await asyncio.open_connection(*gateway.address)
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield reader, writer
    finally:
        writer.close()


def head(gateway: RunningGateway, length: int, *more: str) -> bytes:
    lines = [f"POST {CHAT} HTTP/1.1", "Host: test", f"Authorization: Bearer {gateway.key}", f"Content-Length: {length}"]
    return "\r\n".join([*lines, *more, "", ""]).encode()


def read_answer(data: bytes) -> tuple[int, str]:
    """Return the status and code of an error that closes its connection."""
    top, _, body = data.partition(b"\r\n\r\n")
    assert b"connection: close" in top and b"content-type: application/json" in top
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return int(top.split(b" ")[1]), error["code"]


async def read_whole(reader: asyncio.StreamReader) -> tuple[dict[str, str], dict[str, Any]]:
    """Return the headers and the body of an answer with a length."""
    top = (await reader.readuntil(b"\r\n\r\n")).decode()
    assert top.startswith("HTTP/1.1 200 OK\r\n")
    headers = dict(line.split(": ", 1) for line in top.split("\r\n")[1:-2])
    return headers, json.loads(await reader.readexactly(int(headers["content-length"])))


@pytest.fixture
async def hasty(start_gateway: StartGateway, card: ModelCard) -> AsyncIterator[RunningGateway]:
    async with start_gateway([FakeEngineClient(card)], **HASTY) as running:
        yield running


@pytest.mark.parametrize("sent", [b"POST /v1/ch", b"POST /v1/chat/completions HTTP/1.1\r\nHost: te", b"G"])
async def test_an_incomplete_head_times_out_with_an_error_and_a_closed_connection(
    hasty: RunningGateway, until: Until, sent: bytes
) -> None:
    async with connect(hasty) as (reader, writer):
        writer.write(sent)
        assert read_answer(await reader.read()) == (408, "request_timeout")
    await until(lambda: hasty.num_connections() == 0)
    assert hasty.rows.rows == []


async def test_a_client_that_drips_its_head_is_hung_up_on_all_the_same(hasty: RunningGateway) -> None:
    async with connect(hasty) as (reader, writer):
        reading = asyncio.create_task(reader.read())
        for byte in head(hasty, 0):
            writer.write(bytes([byte]))
            await asyncio.wait([reading], timeout=0.02)
            if reading.done():
                break
        assert read_answer(await reading) == (408, "request_timeout")


@pytest.mark.parametrize("sent", [b"", b"\r\n"])
async def test_a_connection_without_a_request_is_closed_without_a_word(
    hasty: RunningGateway, until: Until, sent: bytes
) -> None:
    async with connect(hasty) as (reader, writer):
        writer.write(sent)
        assert await reader.read() == b""
    await until(lambda: hasty.num_connections() == 0)


async def test_an_incomplete_body_times_out_with_an_error_and_frees_its_memory(
    hasty: RunningGateway, until: Until
) -> None:
    async with connect(hasty) as (reader, writer):
        writer.write(head(hasty, 1000) + b'{"model": ')
        assert read_answer(await reader.read()) == (408, "request_timeout")
    (row,) = await hasty.rows.wait_for(1)
    assert (row.outcome, row.prompt_tokens) == ("disconnected", 0)
    assert hasty.engine.submits == []
    await until(lambda: hasty.num_connections() == 0)


async def test_timeouts_of_the_messages_api_have_its_error_format(hasty: RunningGateway) -> None:
    for sent in (b"POST /v1/messages HTTP/1.1\r\nHost: te", head(hasty, 100).replace(CHAT.encode(), MESSAGES.encode())):
        async with connect(hasty) as (reader, writer):
            writer.write(sent)
            top, _, body = (await reader.read()).partition(b"\r\n\r\n")
            answer = json.loads(body)
            assert top.startswith(b"HTTP/1.1 408 ")
            assert (answer["type"], answer["error"]["details"]) == ("error", {"error_code": "request_timeout"})
            assert answer["error"]["type"] == "invalid_request_error"


async def test_a_client_that_drips_its_body_is_hung_up_on(hasty: RunningGateway) -> None:
    async with connect(hasty) as (reader, writer):
        writer.write(head(hasty, 10_000))
        reading = asyncio.create_task(reader.read())
        while not reading.done():
            writer.write(b" ")
            await asyncio.wait([reading], timeout=0.02)
        assert read_answer(await reading) == (408, "request_timeout")


async def test_a_body_that_takes_long_but_comes_on_is_served(start_gateway: StartGateway, card: ModelCard) -> None:
    data = json.dumps({**BODY, "padding": "x" * 2000}).encode()
    async with (
        start_gateway([FakeEngineClient(card)], body_timeout_s=2) as gateway,
        connect(gateway) as (reader, writer),
    ):
        writer.write(head(gateway, len(data), "Connection: close"))
        for start in range(0, len(data), 200):
            await asyncio.sleep(0.2)  # a tenth of the limit, since this process may be slow
            writer.write(data[start : start + 200])
        assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


async def test_a_body_sent_after_its_refusal_does_not_hold_the_connection(hasty: RunningGateway) -> None:
    async with connect(hasty) as (reader, writer):
        writer.write(head(hasty, 1000).replace(hasty.key.encode(), b"nonsense"))
        answer = await reader.readuntil(b"}}")
        assert answer.startswith(b"HTTP/1.1 401 ")
        writer.write(b"x")
        assert await reader.read() == b""


async def test_a_kept_connection_is_closed_when_it_is_idle_and_serves_before(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    data = json.dumps(BODY).encode()
    async with (
        start_gateway([FakeEngineClient(card)], keep_alive_s=2) as gateway,
        connect(gateway) as (reader, writer),
    ):
        for _ in range(2):
            writer.write(head(gateway, len(data)) + data)
            assert (await reader.readuntil(b"}}}")).startswith(b"HTTP/1.1 200 ")
        assert await reader.read() == b""


async def test_an_answer_that_takes_longer_than_the_timeouts_is_not_cut(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.1)], **HASTY) as gateway:
        stream = await gateway.client.chat.completions.create(**BODY | {"max_tokens": 8}, stream=True)
        assert [chunk.choices[0].finish_reason async for chunk in stream][-1] == "length"


async def test_the_start_of_a_next_request_does_not_cut_an_answer(start_gateway: StartGateway, card: ModelCard) -> None:
    async with start_gateway([FakeEngineClient(card, token_s=0.1)], **HASTY) as gateway:
        data = json.dumps(BODY | {"max_tokens": 8}).encode()
        async with connect(gateway) as (reader, writer):
            writer.write(head(gateway, len(data)) + data + b"POST /v1/ch")
            answer = await reader.read()
            assert answer.startswith(b"HTTP/1.1 200 ")
            assert b'"finish_reason":"length"' in answer
            assert answer.count(b"HTTP/1.1 408 ") == 1


@pytest.mark.parametrize("in_pieces", [False, True])
@pytest.mark.parametrize(
    "sent",
    [
        b"GET /healthz?" + b"x" * 10_000 + b" HTTP/1.1\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Long: " + b"x" * 10_000 + b"\r\n\r\n",
        b"GET /healthz HTTP/1.1\r\nHost: a\r\nX-Endless: " + b"x" * 10_000,
        b"GET /healthz HTTP/1.1\r\n" + b"x" * 10_000,
        b"GET /healthz HTTP/1.1\r\n" + b"a: b\r\n" * 40 + b"\r\n",
        b"GET /healthz HTTP/1.1\r\n" + b"abcdefgh: 12345678\r\n" * 1000 + b"\r\n",
    ],
)
async def test_a_head_that_is_too_large_is_refused(
    start_gateway: StartGateway, card: ModelCard, sent: bytes, in_pieces: bool
) -> None:
    async with (
        start_gateway([FakeEngineClient(card)], max_header_bytes=8192, max_headers=32) as gateway,
        connect(gateway) as (reader, writer),
    ):
        for start in range(0, len(sent), 1000 if in_pieces else len(sent)):
            writer.write(sent[start : start + (1000 if in_pieces else len(sent))])
            await asyncio.sleep(0.001 if in_pieces else 0)
        assert read_answer(await reader.read()) == (431, "headers_too_large")


async def test_a_head_just_within_the_bounds_is_read_however_it_comes(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    async with start_gateway([FakeEngineClient(card)], max_header_bytes=8192, max_headers=32) as gateway:
        fields = b"".join(b"x-%02d: %s\r\n" % (number, b"v" * 230) for number in range(30))
        sent = b"GET /healthz HTTP/1.1\r\nHost: a\r\nConnection: close\r\n" + fields + b"\r\n"
        for size in (len(sent), 1000, 7):
            async with connect(gateway) as (reader, writer):
                for start in range(0, len(sent), size):
                    writer.write(sent[start : start + size])
                    await writer.drain()
                    await asyncio.sleep(0)
                assert (await reader.read()).startswith(b"HTTP/1.1 200 ")


@pytest.mark.parametrize(
    "sent",
    [
        b"nonsense\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
        b"GET / HTTP/1.1\r\nBad Header: x\r\n\r\n",
    ],
)
async def test_malformed_http_is_answered_with_the_apis_error_format(gateway: RunningGateway, sent: bytes) -> None:
    async with connect(gateway) as (reader, writer):
        writer.write(sent)
        assert read_answer(await reader.read()) == (400, "bad_http")


async def test_a_broken_chunk_ends_its_request(gateway: RunningGateway, until: Until) -> None:
    async with connect(gateway) as (reader, writer):
        writer.write(head(gateway, 0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked") + b"zz\r\n")
        assert read_answer(await reader.read()) == (400, "bad_http")
    (row,) = await gateway.rows.wait_for(1)
    assert row.outcome == "disconnected"


@pytest.mark.parametrize("field", ["Authorization", "X-Api-Key"])
@pytest.mark.parametrize("is_authorized", [True, False])
async def test_trailer_fields_are_not_request_headers(gateway: RunningGateway, field: str, is_authorized: bool) -> None:
    body = json.dumps(BODY).encode()
    real, trailer = (gateway.key, "wrong") if is_authorized else (None, gateway.key)
    lines = [f"POST {CHAT} HTTP/1.1", "Host: test", "Content-Type: application/json", "Transfer-Encoding: chunked"]
    lines += [f"Authorization: Bearer {real}"] if real else []
    value = f"Bearer {trailer}" if field == "Authorization" else trailer
    sent = "\r\n".join([*lines, "", ""]).encode() + b"%x\r\n%b\r\n0\r\n" % (len(body), body)
    async with connect(gateway) as (reader, writer):
        writer.write(sent + f"{field}: {value}\r\n\r\n".encode())  # one segment
        status = (await reader.readline()).split(b" ")[1]
    assert status == (b"200" if is_authorized else b"401")


async def test_a_key_has_so_many_streams_open(start_gateway: StartGateway, new_card: NewCard, until: Until) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), lambda submit: ((65, "x") for _ in range(10**7)))
    async with start_gateway([engine], max_streams_per_key=2) as gateway, AsyncExitStack() as stack:
        body: dict[str, Any] = {**BODY, "max_tokens": 1_000_000}
        streams = [await gateway.client.chat.completions.create(**body, stream=True) for _ in range(2)]
        for stream in streams:
            stack.push_async_callback(stream.close)
        status, headers, answer = await gateway.post(CHAT, {**body, "stream": True})
        assert (status, json.loads(answer)["error"]["code"]) == (429, "too_many_streams")
        assert headers["retry-after"] == "1"
        status, headers, answer = await gateway.post(MESSAGES, {**body, "stream": True})
        assert (status, json.loads(answer)["error"]["details"]["error_code"]) == (429, "too_many_streams")
        assert headers["retry-after"] == "1"
        assert (await gateway.post(CHAT, BODY))[0] == 200  # an answer that is not streamed
        await streams[0].close()
        await gateway.rows.wait_for(4)
        status, _, _ = await gateway.post(CHAT, {**BODY, "stream": True})
        assert status == 200


async def test_the_shape_of_a_body_is_bounded_by_settings(start_gateway: StartGateway, card: ModelCard) -> None:
    bounds: dict[str, Any] = {"max_messages": 3, "max_choices": 2, "max_stop_strings": 2, "max_stop_chars": 5}
    message = {"role": "user", "content": "hi"}
    async with start_gateway([FakeEngineClient(card)], **bounds) as gateway:
        for path, changes, param, words in [
            (CHAT, {"messages": [message] * 4}, "messages", "may have 3 entries"),
            (CHAT, {"messages": [message] * 16_000}, "messages", "may have 3 entries"),
            ("/tokenize", {"messages": [message] * 4}, "messages", "may have 3 entries"),
            (CHAT, {"n": 3}, "n", "2 at most"),
            (CHAT, {"stop": ["a"] * 3}, "stop", "at most 2 strings"),
            (CHAT, {"stop": ["abcdef"]}, "stop", "longer than 5 characters"),
            (CHAT, {"stop": "abcdef"}, "stop", "longer than 5 characters"),
        ]:
            status, _, answer = await gateway.post(path, {**BODY, **changes})
            error = json.loads(answer)["error"]
            assert (status, error["param"]) == (400, param), answer
            assert words in error["message"]
        fits: dict[str, Any] = {"messages": [message] * 3, "n": 2, "stop": ["a", "abcde"]}
        assert (await gateway.post(CHAT, {**BODY, **fits}))[0] == 200


async def test_the_shape_of_a_message_is_bounded_by_the_same_settings(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    bounds: dict[str, Any] = {"max_messages": 3, "max_stop_strings": 2, "max_stop_chars": 5}
    message = {"role": "user", "content": "hi"}
    async with start_gateway([FakeEngineClient(card)], **bounds) as gateway:
        for path, changes, param, words in [
            (MESSAGES, {"messages": [message] * 4}, "messages", "may have 3 entries"),
            (MESSAGES, {"messages": [message] * 17_000}, "messages", "may have 3 entries"),
            (f"{MESSAGES}/count_tokens", {"messages": [message] * 4}, "messages", "may have 3 entries"),
            (MESSAGES, {"stop_sequences": ["a"] * 3}, "stop_sequences", "may have 2 entries"),
            (MESSAGES, {"stop_sequences": ["a"] * 65}, "stop_sequences", "may have 2 entries"),
            (MESSAGES, {"stop_sequences": ["abcdef"]}, "stop_sequences.0", "it may have 5"),
            (MESSAGES, {"stop_sequences": ["a" * 10_000]}, "stop_sequences.0", "it may have 5"),
        ]:
            status, _, answer = await gateway.post(path, {**BODY, **changes})
            error = json.loads(answer)["error"]
            assert (status, error["details"]["param"]) == (400, param), answer
            assert words in error["message"]
        fits: dict[str, Any] = {"messages": [message] * 3, "stop_sequences": ["a", "abcde"]}
        assert (await gateway.post(MESSAGES, {**BODY, **fits}))[0] == 200


async def test_malformed_input_during_a_response_ends_the_response(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), lambda submit: ((65, "x") for _ in range(10**7)))
    async with start_gateway([engine]) as gateway, connect(gateway) as (reader, writer):
        body = json.dumps({**BODY, "max_tokens": 1_000_000}).encode()
        writer.write(head(gateway, len(body)) + body)
        await until(lambda: engine.state.num_inflight == 1)
        writer.write(b"\x00\x00\r\n\r\n")
        (row,) = await gateway.rows.wait_for(1)
        assert row.outcome == "disconnected"
        assert gateway.num_connections() == 1  # which is read from for a while yet, so that the client gets its answer
        assert read_answer(await reader.read()) == (400, "bad_http")


async def test_an_answer_is_the_same_whether_its_connection_stays_or_ends_or_has_more_requests_sent_ahead(
    start_gateway: StartGateway, card: ModelCard
) -> None:
    body = json.dumps(BODY).encode()
    async with start_gateway([FakeEngineClient(card)]) as gateway, connect(gateway) as (reader, writer):
        request = head(gateway, len(body), "X-Request-Id: mine") + body
        last = head(gateway, len(body), "X-Request-Id: mine", "Connection: close") + body
        writer.write(request)
        alone = await read_whole(reader)
        writer.write(request + request + last)  # ahead: the second and third wait for the first
        others = [await read_whole(reader) for _ in range(3)]
        assert await reader.read() == b""
    (headers, answer), *_ = answers = [alone, *others]
    assert headers["x-request-id"] == "mine"
    assert answers[-1][0].pop("connection") == "close"
    assert [sorted(found) for found, _ in answers] == [sorted(headers)] * 4
    assert [found["choices"] for _, found in answers] == [answer["choices"]] * 4
    assert len({found["id"] for _, found in answers}) == 4


def test_writes_to_a_disconnected_client_are_dropped_without_an_error() -> None:
    """On the event loop that serves."""
    errors = []

    class Answering(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            self.transport = CoalescingTransport(transport, asyncio.get_running_loop())

        def eof_received(self) -> None:
            asyncio.get_running_loop().call_soon(self.transport.write, b"a piece that came in the same turn")

        def connection_lost(self, _: Any) -> None:
            gone.set()

    async def leave() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: errors.append(context))
        server = await loop.create_server(Answering, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        writer.close()
        await gone.wait()
        for _ in range(3):
            await asyncio.sleep(0)
        server.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        gone = asyncio.Event()
        runner.run(leave())
    assert errors == []
