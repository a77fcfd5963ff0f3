"""HTTP servers of our processes: uvicorn with our limits of connections, and without its signal handlers."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator
from typing import Any

import uvicorn

from moiety_platform.connections import ClientConnection, ConnectionLimits, ServerConfig
from moiety_platform.listening import BACKLOG

SWITCHED_OFF: dict[str, Any] = {  # parts of uvicorn that our servers do without
    "ws": "none",
    "lifespan": "off",
    "log_config": None,
    "access_log": False,
    "server_header": False,
    "proxy_headers": False,
}


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handlers, which would end the process before it cleans up.

    `drain_s` bounds the time that a stop takes, with what is left of running requests.
    """

    def __init__(self, app: Any, drain_s: int, limits: ConnectionLimits) -> None:
        self.limited = ServerConfig(app, limits, timeout_graceful_shutdown=drain_s, backlog=BACKLOG, **SWITCHED_OFF)
        super().__init__(self.limited)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, end the open ones, and close what is idle after `drain_s`."""
        self.limited.is_draining = True
        await super().shutdown(sockets)
        for connection in list(self.server_state.connections):
            assert isinstance(connection, ClientConnection)
            connection.close_if_idle()
        await asyncio.sleep(0)  # in which the event loop closes their sockets

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def request_exit(self) -> None:
        """Drain; at the second call, stop at once."""
        self.force_exit = self.should_exit
        self.should_exit = True
