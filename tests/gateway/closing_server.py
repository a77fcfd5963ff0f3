"""A server on loopback for tests, which leaves no connection and no task behind when it is closed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

ACCEPT_TURNS = 8  # of the event loop, which it needs at most from an accepted socket to its closed transport


async def read_request(reader: asyncio.StreamReader) -> str:
    """Read an HTTP request with its body, and return its head in lower case."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
    lengths = [line.split(":")[1] for line in head.split("\r\n") if line.startswith("content-length:")]
    await reader.readexactly(int(lengths[0]) if lengths else 0)
    return head


class ClosingServer:
    """Runs `serve` for each connection. `writers` are those of the open ones."""

    def __init__(self, serve: Serve) -> None:
        self._serve = serve
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None
        self._is_closed = False
        self.writers: set[asyncio.StreamWriter] = set()
        self.port = 0

    async def start(self, port: int = 0) -> None:
        self._is_closed = False
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", port)
        self.port = self._server.sockets[0].getsockname()[1]

    def stop_listening(self) -> None:
        if self._server is not None:
            self._server.close()

    async def close(self) -> None:
        """Cut every connection, those that were accepted just now among them, and end their tasks."""
        self._is_closed = True
        self.stop_listening()
        for writer in self.writers:
            writer.transport.abort()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
        for _ in range(ACCEPT_TURNS):
            await asyncio.sleep(0)

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Called by the event loop as it accepts, and not in a task that `close` could miss."""
        if self._is_closed:
            writer.transport.abort()
            return
        self.writers.add(writer)
        task = asyncio.create_task(self._run(reader, writer))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _run(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._serve(reader, writer)
        finally:
            self.writers.discard(writer)
            writer.close()
