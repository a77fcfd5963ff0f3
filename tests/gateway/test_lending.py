"""Engines are sent the adapters that requests name: once, again after the engine has dropped them, and never those that
it was started with. A real client and a real engine server, with a scripted core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from tests.scripted_servers import running_server
from tests.wire_submits import wire_submit

from moiety_engine.messages import CoreAdapter
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.base import EngineState
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_platform.errors import NotFound, PlatformError, Unavailable
from moiety_platform.routing.choose import RequestNeed, first_engines
from moiety_wire.messages import AdapterPart, Finished, ModelCard, Stopping, Submit

from .conftest import Until

PARTS = {name: [name.encode() * 10, b"second", b"third"] for name in ("ada_a", "ada_b")}
SIZE = sum(map(len, PARTS["ada_a"]))


class Core(ScriptedCore):
    """The scripted core, and what it was told of adapters."""

    def __init__(self) -> None:
        super().__init__(Script(tokens=tuple(b"abc")))
        self.found: list[tuple[str, str, bytes]] = []

    def send(self, commands: Any) -> None:
        for command in commands:
            if isinstance(command, CoreAdapter):
                folder = Path(command.folder)
                config, tensors = folder / "adapter_config.json", folder / "adapter_model.safetensors"
                self.found.append((command.name, config.read_text(), tensors.read_bytes()))
        super().send(commands)


class Store:
    """A store of adapters that counts the reads of each."""

    def __init__(self) -> None:
        self.reads: list[str] = []
        self.is_slow = False

    async def parts(self, adapter_id: str) -> AsyncIterator[Any]:
        self.reads.append(adapter_id)
        if self.is_slow:
            await asyncio.Event().wait()
        if adapter_id not in PARTS:
            raise NotFound("there is no such adapter")
        for index, data in enumerate(PARTS[adapter_id]):
            await asyncio.sleep(0)
            yield AdapterPart(adapter_id, index, data, "" if index else "{}", index == 2)


@asynccontextmanager
async def engine_and_client(until: Until, **settings: Any) -> AsyncIterator[tuple[Any, ...]]:
    context, core, store = zmq.Context(), Core(), Store()
    try:
        async with running_server(context, core, **settings) as front:
            client = ZmqEngineClient(front.address, context, SystemClock(), adapters=store.parts)
            try:
                await client.start()
                await until(lambda: client.state.healthy)
                yield client, core, store, front
            finally:
                await client.close()
    finally:
        context.destroy(linger=0)


def submit(request_id: str, adapter: Any, credit_tokens: int = 3) -> Submit:
    stopping = Stopping(max_tokens=3, ignore_eos=True)
    return wire_submit(request_id, prompt_ids=[1, 2], stopping=stopping, credit_tokens=credit_tokens, adapter=adapter)


async def ask(client: Any, request_id: str, adapter: Any) -> Finished:
    async with asyncio.timeout(60), client.open(submit(request_id, adapter)) as stream:
        return [message async for message in stream.messages()][-1]


def whole(name: str) -> tuple[str, str, bytes]:
    return name, "{}", b"".join(PARTS[name])


async def test_an_adapter_is_sent_once_however_many_want_it(until: Until) -> None:
    async with engine_and_client(until) as (client, core, store, _front):
        ends = await asyncio.gather(*(ask(client, f"r{i}", "ada_a") for i in range(5)))
        ends.append(await ask(client, "later", "ada_a"))
        assert [end.num_output_tokens for end in ends] == [3] * 6
        assert store.reads == ["ada_a"]
        assert core.found == [whole("ada_a")]


async def test_evicted_adapters_are_sent_again(until: Until) -> None:
    async with engine_and_client(until, adapter_disk_bytes=SIZE) as (client, core, store, _front):
        for request_id, adapter in (("1", "ada_a"), ("2", "ada_b"), ("3", "ada_a"), ("4", "ada_a")):
            assert (await ask(client, request_id, adapter)).num_output_tokens == 3
        assert store.reads == ["ada_a", "ada_b", "ada_a"]
        assert core.found == [whole("ada_a"), whole("ada_b"), whole("ada_a")]


async def test_one_that_is_too_large_for_the_engine_fails_its_request_in_the_end(until: Until) -> None:
    async with engine_and_client(until, adapter_disk_bytes=SIZE - 1) as (client, core, _, _front):
        with pytest.raises(Exception, match="does not have this adapter"):
            await ask(client, "r", "ada_a")
        assert core.found == []
        assert (await ask(client, "other", "")).num_output_tokens == 3


async def test_a_deleted_adapter_is_reported_missing_and_the_connection_continues(until: Until) -> None:
    async with engine_and_client(until) as (client, _, _store, _front):
        with pytest.raises(NotFound):
            await ask(client, "r", "ada_gone")
        assert (await ask(client, "r", "")).num_output_tokens == 3
        assert client.state.num_inflight == 0


async def test_adapters_of_the_engines_command_line_are_not_sent(until: Until) -> None:
    async with engine_and_client(until, adapters=("given",)) as (client, core, store, _front):
        assert (await ask(client, "r", "given")).num_output_tokens == 3
        assert (store.reads, core.found) == ([], [])


async def test_requests_waiting_for_an_adapter_fail_when_the_engine_is_lost(until: Until) -> None:
    async with engine_and_client(until) as (client, _, store, front):
        store.is_slow = True
        waiting = [asyncio.create_task(ask(client, f"r{i}", "ada_a")) for i in range(3)]
        await until(lambda: store.reads)
        await front.close()
        for end in await asyncio.gather(*waiting, return_exceptions=True):
            assert isinstance(end, PlatformError) and end.status in (502, 503)


async def test_credit_granted_while_the_adapter_is_sent_again_is_kept(until: Until) -> None:
    async with engine_and_client(until, adapter_disk_bytes=SIZE) as (client, _, _store, _front):
        for request_id, adapter in (("1", "ada_a"), ("2", "ada_b")):
            await ask(client, request_id, adapter)
        async with asyncio.timeout(60), client.open(submit("3", "ada_a", credit_tokens=1)) as stream:
            stream.extend(2, last=True)
            *_, end = [message async for message in stream.messages()]
        assert (end.num_output_tokens, end.detail) == (2, "credit_refused")


def test_engines_that_serve_no_adapters_are_passed_by(card: ModelCard) -> None:
    cards = [msgspec.structs.replace(card, engine_id=name, takes_adapters=name == "b") for name in "ab"]
    plain, able = (EngineState(f"tcp://{one.engine_id}", True, "", one, None, 0) for one in cards)
    assert first_engines([plain, able], RequestNeed.ADAPTED) == [able]
    assert first_engines([plain, able], RequestNeed.ANSWER) == [plain, able]
    with pytest.raises(Unavailable, match="serves adapters"):
        first_engines([plain], RequestNeed.ADAPTED)
