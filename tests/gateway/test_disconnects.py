"""A client that disconnects at any byte: the engine's work ends, and one usage row has exactly what was generated."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from moiety_platform.engine_client.fake import FakeEngineClient
from moiety_wire.messages import Submit

from .conftest import NewCard, RunningGateway, StartGateway, Until

CHAT = "/v1/chat/completions"


def endless(submit: Submit) -> Any:
    """A script that ends only with its credit."""
    return ((65, f"{'x' * 50}{i} ") for i in range(submit.stopping.max_tokens))


def request_bytes(gateway: RunningGateway, **fields: Any) -> bytes:
    body = json.dumps({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], **fields}).encode()
    head = f"Host: test\r\nAuthorization: Bearer {gateway.key}\r\nContent-Length: {len(body)}"
    return f"POST {CHAT} HTTP/1.1\r\n{head}\r\n\r\n".encode() + body


@pytest.fixture
async def slow_gateway(start_gateway: StartGateway, new_card: NewCard) -> AsyncIterator[RunningGateway]:
    """An engine that never finishes by itself: its context is larger than any test reads."""
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine]) as running:
        yield running


async def test_a_client_that_leaves_in_mid_stream_ends_its_request_at_the_engine(slow_gateway: RunningGateway) -> None:
    reader, writer = await asyncio.open_connection(*slow_gateway.address)
    writer.write(request_bytes(slow_gateway, stream=True))
    await reader.readuntil(b"x" * 50)
    writer.close()
    (row,) = await slow_gateway.rows.wait_for(1)
    assert (row.outcome, row.http_status, row.error_code) == ("disconnected", 499, "client_disconnected")
    assert row.output_tokens == slow_gateway.engine.state.load.output_tokens_total > 0
    assert slow_gateway.engine.state.num_inflight == 0


async def test_an_immediate_shutdown_sends_an_error_to_running_streams(
    start_gateway: StartGateway, new_card: NewCard
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine], drain_s=0) as gateway:
        reader, writer = await asyncio.open_connection(*gateway.address)
        writer.write(request_bytes(gateway, stream=True))
        await reader.readuntil(b"x" * 50)
        gateway.stop()
        rest = await reader.read()
        while not rest.endswith(b"\r\n0\r\n\r\n") and (more := await reader.read()):
            rest += more
        writer.close()
        last = rest.strip().split(b"data: ")[-1]
        assert json.loads(last.split(b"\n\n")[0])["error"]["code"] == "server_stopping"
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("failed", 200, "server_stopping")
        assert row.output_tokens == engine.state.load.output_tokens_total


async def test_a_client_that_leaves_while_a_whole_answer_is_made_ends_its_request(
    slow_gateway: RunningGateway, until: Until
) -> None:
    _, writer = await asyncio.open_connection(*slow_gateway.address)
    writer.write(request_bytes(slow_gateway, n=2))
    await until(lambda: slow_gateway.engine.state.load.output_tokens_total > 5)
    writer.close()
    (row,) = await slow_gateway.rows.wait_for(1)
    assert (row.outcome, row.http_status) == ("disconnected", 499)
    assert row.output_tokens == slow_gateway.engine.state.load.output_tokens_total
    assert slow_gateway.engine.state.num_inflight == 0


async def test_a_client_that_does_not_read_pauses_the_engine_instead_of_filling_memory(
    slow_gateway: RunningGateway, until: Until
) -> None:
    reader, writer = await asyncio.open_connection(*slow_gateway.address, limit=1024)
    writer.write(request_bytes(slow_gateway, stream=True))
    await reader.readuntil(b"\r\n\r\n")
    await until(lambda: slow_gateway.engine.state.load.num_paused == 1)
    paused_at = slow_gateway.engine.state.load.output_tokens_total
    for _ in range(50):
        await asyncio.sleep(0)
    assert slow_gateway.engine.state.load.output_tokens_total == paused_at
    writer.close()
    (row,) = await slow_gateway.rows.wait_for(1)
    assert (row.outcome, row.output_tokens) == ("disconnected", paused_at)


async def test_a_client_that_never_reads_is_hung_up_on_and_its_request_ends(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=10_000_000), endless)
    async with start_gateway([engine], send_timeout_s=0.2) as gateway:
        unread = socket.socket()
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(unread, gateway.address)
        await loop.sock_sendall(unread, request_bytes(gateway, stream=True))
        (row,) = await gateway.rows.wait_for(1)
        assert (row.outcome, row.http_status, row.error_code) == ("disconnected", 499, "client_disconnected")
        assert row.output_tokens == engine.state.load.output_tokens_total > 0
        assert engine.state.num_inflight == 0
        await until(lambda: gateway.num_connections() == 0)  # dropped, without a wait for a client that does not read
        unread.close()


async def test_clients_that_leave_after_any_byte_leave_one_row_each_with_exact_counts(
    start_gateway: StartGateway, new_card: NewCard, until: Until
) -> None:
    engine = FakeEngineClient(new_card(max_context_tokens=200))
    rng = random.Random(20)
    async with start_gateway([engine]) as gateway:
        num_authenticated = 0
        for _ in range(60):
            data = request_bytes(gateway, stream=rng.random() < 0.7, n=rng.choice([1, 1, 3]), max_tokens=60)
            num_sent = rng.randrange(len(data) + 1) if rng.random() < 0.4 else len(data)
            reader, writer = await asyncio.open_connection(*gateway.address)
            writer.write(data[:num_sent])
            await writer.drain()
            if num_sent == len(data) and rng.random() < 0.8:
                await reader.read(rng.randrange(1, 4000))
            writer.transport.abort()
            num_authenticated += data[:num_sent].find(b"\r\n\r\n") >= 0
        # a request may end before the server notices the disconnect, but none is missing or counted twice
        rows = await gateway.rows.wait_for(num_authenticated)
        await until(lambda: engine.state.num_inflight == 0)
        assert len({row.request_id for row in rows}) == len(rows) == num_authenticated
        assert {row.outcome for row in rows} <= {"disconnected", "length"}
        assert sum(row.output_tokens for row in rows) == engine.state.load.output_tokens_total
        assert any(row.outcome == "disconnected" and row.output_tokens for row in rows)
        answer = await gateway.client.models.list()
        assert answer.data
