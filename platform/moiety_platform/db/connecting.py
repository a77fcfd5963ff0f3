"""Opening of connections in separate tasks, so that a cancelled caller leaves no connection open.

A driver that is cancelled while it connects can lose the connection that its thread or server has just made: nothing
closes it, and it keeps its descriptors until garbage collection.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only, greenlet_spawn

Options = dict[str, Any]
Connect = Callable[[Dialect, list[Any], Options], DBAPIConnection]

POLL_S = 0.005


class OpenConnections:
    """Tasks in which an engine's connections are opened and closed, and the threads that the driver has for them."""

    def __init__(self) -> None:
        self.are_direct = False  # True after one to PostgreSQL was opened, and none through a pooler
        self.tasks: set[asyncio.Task[Any]] = set()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._lock = threading.Lock()

    def add_thread(self) -> None:
        """Note the calling thread, which ends with its connection."""
        with self._lock:
            self._threads.add(threading.current_thread())

    async def wait_closed(self, timeout_s: float) -> bool:
        """Wait until every task and thread has ended; return whether they did within the timeout.

        A task or thread that outlives the event loop fails, since it reports its result to that loop.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while self._is_open() and loop.time() < deadline:  # noqa: ASYNC110  the end of a thread sets no event
            await asyncio.sleep(POLL_S)
        return not self._is_open()

    def start(self, task: asyncio.Task[Any]) -> None:
        """Note a task until its end."""
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _is_open(self) -> bool:
        with self._lock:
            return bool(self.tasks) or any(one.is_alive() for one in self._threads)


def connect_of_dialect(dialect: Dialect, arguments: list[Any], options: Options) -> DBAPIConnection:
    """Open a connection as SQLAlchemy does by default."""
    connection: DBAPIConnection = dialect.connect(*arguments, **options)
    return connection


def connect_uncancelled(engine: AsyncEngine, opened: OpenConnections, connect: Connect = connect_of_dialect) -> None:
    """Have the engine finish every connection that it begins; close the connection of a cancelled caller once open."""

    def connect_in_task(
        dialect: Dialect, _record: ConnectionPoolEntry, arguments: list[Any], options: Options
    ) -> DBAPIConnection:
        connection: DBAPIConnection = await_only(_connect(opened, connect, dialect, arguments, options))
        return connection

    event.listen(engine.sync_engine, "do_connect", connect_in_task)


async def _connect(
    opened: OpenConnections, connect: Connect, dialect: Dialect, arguments: list[Any], options: Options
) -> DBAPIConnection:
    connecting = asyncio.create_task(greenlet_spawn(connect, dialect, arguments, options), name="database-connect")
    opened.start(connecting)
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        opened.start(asyncio.create_task(_close_unwanted(connecting), name="database-close"))
        raise


async def _close_unwanted(connecting: asyncio.Task[DBAPIConnection]) -> None:
    await asyncio.wait([connecting])
    if not connecting.cancelled() and connecting.exception() is None:
        await greenlet_spawn(connecting.result().close)
