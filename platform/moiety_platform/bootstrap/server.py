"""The gateway's HTTP server: uvicorn with our limits of connections, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn
from litestar import Litestar

from moiety_platform.connections import ConnectionLimits, ServerConfig
from moiety_platform.listening import BACKLOG
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.shared_wake_ups import next_round_s, process_phase_s

TICK_S = 1.0  # interval at which the Date header of responses is renewed
SWITCHED_OFF: dict[str, Any] = {  # parts of uvicorn that a gateway does without
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}


class GatewayServer(uvicorn.Server):
    """uvicorn with our limits, and without its signal handlers, which would end the process before it cleans up."""

    def __init__(
        self,
        app: Litestar,
        drain_s: int,
        limits: ConnectionLimits,
        on_started: Callable[[], None] = lambda: None,
        on_draining: Callable[[], None] = lambda: None,
    ) -> None:
        self._on_started = on_started
        self._on_draining = on_draining
        self._wake_up: Callable[[], object] | None = None  # ends the wait for the next tick
        self._limited = ServerConfig(app, limits, timeout_graceful_shutdown=drain_s, backlog=BACKLOG, **SWITCHED_OFF)
        super().__init__(self._limited)

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        """Follow the limits of connections. Running requests keep their limits."""
        live.follow([*ConnectionLimits.__dataclass_fields__, "drain_s"], self._use)

    def _use(self, settings: GatewaySettings) -> None:
        self._limited.use(ConnectionLimits.of(settings))
        self._limited.timeout_graceful_shutdown = settings.drain_s

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._on_started()

    async def main_loop(self) -> None:
        """Wait for `request_exit`. uvicorn's own loop wakes up ten times a second to look whether it was called."""
        loop, woken = asyncio.get_running_loop(), asyncio.Event()
        self._wake_up = lambda: loop.call_soon_threadsafe(woken.set)
        try:
            while not await self.on_tick(0):
                timer = loop.call_at(next_round_s(loop.time(), TICK_S, process_phase_s()), woken.set)
                await woken.wait()
                timer.cancel()
                woken.clear()
        finally:
            self._wake_up = None

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Drain, then close the idle connections that are left: those that were accepted during the drain."""
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            connection.shutdown()
        await asyncio.sleep(0)  # in which the event loop closes their sockets

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_exit(self) -> None:
        """Drain; at the second call, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
        if self._wake_up is not None:
            self._wake_up()
        self._on_draining()
