"""The gateway's HTTP server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable

from litestar import Litestar

from moiety_platform.connections import ConnectionLimits
from moiety_platform.http_server import HttpServer
from moiety_platform.live_settings import LiveSettings
from moiety_platform.settings import GatewaySettings
from moiety_platform.shared_wake_ups import next_round_s, process_phase_s

TICK_S = 1.0  # interval at which the Date header of responses is renewed


class GatewayServer(HttpServer):
    """HTTP server whose limits follow the live settings, and which wakes up once a second at most."""

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
        super().__init__(app, drain_s, limits)

    def followed_by(self, live: LiveSettings[GatewaySettings]) -> None:
        """Follow the limits of connections. Running requests keep their limits."""
        live.follow([*ConnectionLimits.__dataclass_fields__, "drain_s"], self._use)

    def _use(self, settings: GatewaySettings) -> None:
        self.limited.use(ConnectionLimits.of(settings))
        self.limited.timeout_graceful_shutdown = settings.drain_s

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

    def request_exit(self) -> None:
        """Drain; at the second call, stop at once."""
        super().request_exit()
        if self._wake_up is not None:
            self._wake_up()
        self._on_draining()
