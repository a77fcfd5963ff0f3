"""Two real engines publish their prefix caches, and a conversation goes to the one that still has its prefix."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest
import zmq
from tests.wire_submits import wire_submit

from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.routing.choose import Prefix
from moiety_platform.routing.replicas import Replicas
from moiety_platform.routing_settings import PrefixRouting
from moiety_wire.classes import STANDARD
from moiety_wire.messages import Stopping, Submit

MODEL, KV_BYTES, DEADLINE_S = "tiny-kv", "1MB", 120


@pytest.fixture
def addresses(tmp_path: Path) -> Iterator[list[str]]:
    """Start two engines with the demo model and a small KV cache."""
    addresses = [f"ipc://{tmp_path}/{name}" for name in ("a", "b")]
    processes = []
    for number, address in enumerate(addresses):
        command = [sys.executable, "-m", "moiety_platform.cli", "engine", "--name", MODEL, "--listen", address]
        command += ["--kv-memory-bytes", KV_BYTES, "--host-kv-memory-bytes", "0"]
        with (tmp_path / f"{number}.log").open("wb") as log:
            processes.append(subprocess.Popen(command, stdout=log, stderr=log))
    try:
        yield addresses
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(timeout=DEADLINE_S)


def submit_of(number: int, num_tokens: int, tenant_id: str = "t") -> Submit:
    prompt = [10 + (7 * position * (number + 3) + number) % 200 for position in range(num_tokens)]
    stopping = Stopping(max_tokens=2)
    return wire_submit(f"r-{tenant_id}-{number}-{num_tokens}", model=MODEL, tenant_id=tenant_id, prompt_ids=prompt,
                       cache_salt=tenant_id.encode(), stopping=stopping, credit_tokens=2)  # fmt: skip


async def compute(client: ZmqEngineClient, submit: Submit, attempt: int = 0) -> int:
    """Return how many tokens of the prompt the engine had cached."""
    submit = msgspec.structs.replace(submit, request_id=f"{submit.request_id}-{client.address[-1]}-{attempt}")
    async with client.open(submit) as stream:
        async for _ in stream.messages():
            pass
    assert stream.finished is not None
    return stream.finished.num_cached_tokens


def is_ready(client: ZmqEngineClient) -> bool:
    state = client.state
    return state.prefix_blocks is not None and state.load is not None and state.load.block_size > 0


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():  # noqa: ASYNC110 - what is watched has no event
            await asyncio.sleep(0.01)


async def test_a_conversation_goes_to_the_engine_that_has_not_evicted_its_prefix(addresses: list[str]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    clients = [ZmqEngineClient(address, context, SystemClock()) for address in addresses]
    first = submit_of(0, 160)
    turn = msgspec.structs.replace(first, prompt_ids=[*first.prompt_ids, *range(20, 60)])
    try:
        async with Replicas(clients) as replicas:
            replicas.use(PrefixRouting.KV_AWARE)
            await until(lambda: all(map(is_ready, clients)))

            def holds(client: ZmqEngineClient) -> bool:
                load, blocks = client.state.load, client.state.prefix_blocks
                names = None if load is None else Prefix(first).block_names(load.block_size)
                assert names is not None and blocks is not None
                return blocks.longest_prefix(names.names) == len(names.names)

            def chosen() -> set[str]:
                return {replicas.choose(MODEL, STANDARD, Prefix(turn))[1].address for _ in range(20)}

            for client in clients:
                await compute(client, first)
            await until(lambda: all(map(holds, clients)))
            assert chosen() == set(addresses), "equal costs are spread at random"
            for evicting, other in (clients, clients[::-1]):
                number = 0
                while holds(evicting):  # a hostile tenant fills the cache of one engine
                    number += 1
                    assert number < 500, "the cache never filled"
                    await compute(evicting, submit_of(number, 200, "hostile"), attempt=number)
                await until(lambda: evicting.state.load is not None and not evicting.state.load.num_running)  # noqa: B023
                assert holds(other)
                await until(lambda: chosen() == {other.address})  # noqa: B023
                assert await compute(other, turn, attempt=number) >= 160 - 16
                await compute(evicting, first, attempt=number)
                await until(lambda: holds(evicting))  # noqa: B023
    finally:
        context.destroy(linger=0)
