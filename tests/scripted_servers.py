"""Engine servers over scripted cores, on a loopback socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import zmq

from moiety_engine.scripted.link import ScriptedCore
from moiety_engine.scripted.text_model import scripted_text_model
from moiety_engine.server.engine_server import EngineServer
from moiety_engine.server.settings import ServerSettings


@asynccontextmanager
async def running_server(
    context: zmq.Context[Any],
    core: ScriptedCore,
    listen: str = "tcp://127.0.0.1:0",
    engine_id: str = "engine-1",
    **settings: Any,
) -> AsyncIterator[EngineServer]:
    """Start an engine server that is ready, with these settings of ServerSettings, and close it at the end."""
    chosen = ServerSettings(model="scripted", listen=listen, heartbeat_interval_s=0.05, **settings)
    server = EngineServer(chosen, engine_id, scripted_text_model(), core, context)
    await server.start()
    try:
        assert await server.wait_ready()
        yield server
    finally:
        await server.close()
