"""Gateways follow the prefix cache of an engine server over sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import msgspec
import zmq
from tests.scripted_servers import running_server

from moiety_engine.messages import PrefixChanges
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_engine.server.engine_server import EngineServer
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.prefix_blocks import PrefixBlocks
from moiety_platform.engine_client.session import Session
from moiety_platform.engine_client.transport import ZmqEngineClient
from moiety_wire.prefix_events import MAX_BLOCKS_PER_MESSAGE, PrefixEvents, PrefixSubscription, pack_names

from .conftest import Until

NUM_BLOCKS = 2 * MAX_BLOCKS_PER_MESSAGE + 3


@asynccontextmanager
async def publishing_engine(context: zmq.Context[zmq.Socket[bytes]], address: str = "") -> AsyncIterator[EngineServer]:
    """Start an engine with blocks 0 to NUM_BLOCKS - 1."""
    listen = {"listen": address} if address else {}
    async with running_server(context, ScriptedCore(Script()), **listen) as server:
        assert server.card is not None
        server.card = msgspec.structs.replace(server.card, publishes_prefixes=True)
        server.on_message(PrefixChanges(pack_names(range(NUM_BLOCKS)), b""))
        yield server


@asynccontextmanager
async def following(
    context: zmq.Context[zmq.Socket[bytes]], address: str
) -> AsyncIterator[tuple[ZmqEngineClient, Callable[[], PrefixBlocks]]]:
    client = ZmqEngineClient(address, context, SystemClock())
    await client.start()
    try:
        yield client, lambda: client.state.prefix_blocks or PrefixBlocks()
    finally:
        await client.close()


@asynccontextmanager
async def followed_engine(until: Until) -> AsyncIterator[tuple[EngineServer, Session, Callable[[], PrefixBlocks]]]:
    """Yield an engine, the session of a gateway that has all its blocks, and what that gateway knows of them."""
    with zmq.Context[zmq.Socket[bytes]]() as context:
        async with publishing_engine(context) as server, following(context, server.address) as (client, blocks):
            await until(lambda: len(blocks()) == NUM_BLOCKS)
            assert client._session is not None
            yield server, client._session, blocks


async def test_each_gateway_gets_a_snapshot_in_parts_then_the_changes(until: Until) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        async with AsyncExitStack() as stack:
            server = await stack.enter_async_context(publishing_engine(context))
            _, first = await stack.enter_async_context(following(context, server.address))
            await until(lambda: len(first()) == NUM_BLOCKS)
            server.on_message(PrefixChanges(pack_names([NUM_BLOCKS]), pack_names([0, 1])))
            _, second = await stack.enter_async_context(following(context, server.address))
            for blocks in (first, second):
                await until(lambda blocks=blocks: len(blocks()) == NUM_BLOCKS - 1)  # type: ignore[misc]
                assert NUM_BLOCKS in blocks() and 0 not in blocks()


async def test_after_a_gap_a_gateway_gets_a_new_snapshot(until: Until) -> None:
    async with followed_engine(until) as (_, session, blocks):
        session._take(PrefixEvents(10**6, pack_names([-1 % 2**60])))  # messages before it are missing
        assert not blocks().is_known and not len(blocks())
        await until(lambda: len(blocks()) == NUM_BLOCKS)


async def test_snapshots_are_paced_however_often_a_gateway_asks(until: Until) -> None:
    async with followed_engine(until) as (server, session, blocks):
        for _ in range(100):
            session.send(PrefixSubscription())
        server.on_message(PrefixChanges(pack_names([NUM_BLOCKS]), b""))
        await until(lambda: len(blocks()) == NUM_BLOCKS + 1)
        (subscription,) = server._prefixes._subscriptions.values()
        assert subscription.seq <= 2 * 3 + 1, "each snapshot has three parts"


async def test_after_a_restart_of_the_engine_its_blocks_are_those_of_the_new_one(until: Until) -> None:
    with zmq.Context[zmq.Socket[bytes]]() as context:
        async with publishing_engine(context) as server:
            address = server.address
            async with following(context, address) as (client, blocks):
                await until(lambda: len(blocks()) == NUM_BLOCKS)
                await server.close()
                await until(lambda: not client.state.healthy)
                async with running_server(context, ScriptedCore(Script()), address, engine_id="engine-2") as other:
                    assert other.card is not None
                    await until(lambda: client.state.healthy)
                    assert client.state.prefix_blocks is None, "a scripted core publishes no blocks"
