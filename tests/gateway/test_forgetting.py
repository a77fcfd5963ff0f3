"""Engines are told which tenants were deleted: each once a connection, and again after a reconnection. Real clients and
engine servers, with scripted cores."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq
from tests.scripted_servers import running_server

from moiety_engine.messages import CoreForget
from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.script import Script
from moiety_platform.clock import SystemClock
from moiety_platform.engine_client.transport import ZmqEngineClient

from .conftest import Until


class Core(ScriptedCore):
    """The scripted core, and what it was told to forget."""

    def __init__(self) -> None:
        super().__init__(Script(tokens=tuple(b"abc")))
        self.told: list[list[str]] = []

    def send(self, commands: Any) -> None:
        self.told += [command.tenant_ids for command in commands if isinstance(command, CoreForget)]
        super().send(commands)


@asynccontextmanager
async def engine(context: Any, listen: Any, engine_id: str) -> AsyncIterator[Any]:
    core = Core()
    async with running_server(context, core, listen, engine_id):
        yield core


async def test_each_engine_is_notified_once_or_when_it_reconnects(until: Until, tmp_path: Path) -> None:
    context, listen = zmq.Context(), f"ipc://{tmp_path}/engine"
    client = ZmqEngineClient(listen, context, SystemClock())
    try:
        client.forget_tenants(["ten_a"])  # nobody is there yet
        await client.start()
        async with engine(context, listen, "engine-1") as core:
            await until(lambda: core.told == [["ten_a"]])
            assert client.state.card.forgets
            client.forget_tenants(["ten_a"])
            client.forget_tenants(["ten_a", "ten_b"])
            await until(lambda: core.told == [["ten_a"], ["ten_b"]])
        await until(lambda: not client.state.healthy)
        client.forget_tenants(["ten_a", "ten_b", "ten_c"])
        async with engine(context, listen, "engine-2") as core:
            await until(lambda: core.told == [["ten_a", "ten_b", "ten_c"]])
    finally:
        await client.close()
        context.destroy(linger=0)
