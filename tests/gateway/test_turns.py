"""A tenant that sends many requests at once does not delay other tenants."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from moiety_platform.admission.gate import MAX_BEGUN, TenantRoundRobin

from .conftest import RunningGateway


async def test_tenants_take_turns_and_each_ones_requests_keep_their_order() -> None:
    turns, order = TenantRoundRobin(), []

    async def begin(tenant_id: str, number: int) -> None:
        await turns.wait(tenant_id)
        order.append((tenant_id, number))

    many = [begin("many", number) for number in range(MAX_BEGUN + 5)]
    await asyncio.gather(*many, begin("few", 0), begin("other", 0), begin("few", 1))
    at_once, waited = order[:MAX_BEGUN], order[MAX_BEGUN:]
    assert at_once == [("many", number) for number in range(MAX_BEGUN)]
    next_many = iter(range(MAX_BEGUN, MAX_BEGUN + 5))
    first = [("many", next(next_many)), ("few", 0), ("other", 0), ("many", next(next_many)), ("few", 1)]
    assert waited == first + [("many", number) for number in next_many]


async def test_sockets_are_served_between_two_turns() -> None:
    turns, num_begun = TenantRoundRobin(), 0
    near, far = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=near)

    async def begin() -> None:
        nonlocal num_begun
        await turns.wait("many")
        num_begun += 1

    tasks = [asyncio.create_task(begin()) for _ in range(50)]
    await asyncio.sleep(0)
    far.sendall(b"x")
    assert await reader.read(1) == b"x"
    assert num_begun < 50 / 2
    await asyncio.gather(*tasks)
    writer.close()
    far.close()


async def test_a_client_that_left_takes_no_turn() -> None:
    turns, order = TenantRoundRobin(), []

    async def begin(number: int) -> None:
        await turns.wait("one")
        order.append(number)

    num_all = MAX_BEGUN + 5
    tasks = [asyncio.create_task(begin(number)) for number in range(num_all)]
    await asyncio.sleep(0)
    for task in tasks[MAX_BEGUN : MAX_BEGUN + 3]:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert order == [*range(MAX_BEGUN), MAX_BEGUN + 3, MAX_BEGUN + 4]
    async with asyncio.timeout(60):
        await begin(num_all)  # nobody is before it


CHAT = {"messages": [{"role": "user", "content": "a word, " * 8}], "max_tokens": 2}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "a word, " * 8, "max_tokens": 2}),
        ("/v1/messages", CHAT),
        ("/v1/responses", {"input": "a word, " * 8, "max_output_tokens": 16}),
    ],
)
async def test_a_single_request_of_a_tenant_starts_before_another_tenants_backlog(
    gateway: RunningGateway, path: str, body: Any
) -> None:
    key, num_many = await gateway.new_tenant_key(), 100
    for known in (gateway.key, key):
        status, _, answer = await gateway.post(path, {"model": "tiny", **body}, known)
        assert status == 200, answer
    paying, begin = gateway.engine.submits[-1].tenant_id, len(gateway.engine.submits)
    data = json.dumps({"model": "tiny", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: test\r\nContent-Length: {len(data)}\r\nConnection: close\r\nAuthorization: "
    connections = [await asyncio.open_connection(*gateway.address) for _ in range(num_many + 1)]
    try:
        for number, (_, writer) in enumerate(connections):  # in one go, so that the gateway finds all of them at once
            key_sent = gateway.key if number < num_many else key
            writer.write(f"{head}Bearer {key_sent}\r\n\r\n".encode() + data)
        answers = await asyncio.gather(*(reader.read() for reader, _ in connections))
    finally:
        for _, writer in connections:
            writer.close()
    assert all(answer.startswith(b"HTTP/1.1 200") for answer in answers)
    place = [submit.tenant_id for submit in gateway.engine.submits[begin:]].index(paying)
    assert place < num_many / 2  # it would be the last; on a busy machine the gateway may find some of them earlier
