"""Opening of connections in separate tasks, so that a cancelled caller leaves no connection open.

A driver that is cancelled while it connects can lose the connection that its thread or server has just made: nothing
closes it, and it keeps its descriptors until garbage collection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from sqlalchemy import Dialect, event
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry
from sqlalchemy.util import await_only, greenlet_spawn

Options = dict[str, Any]
Connect = Callable[[Dialect, list[Any], Options], DBAPIConnection]

_closing: set[asyncio.Task[None]] = set()


def connect_of_dialect(dialect: Dialect, arguments: list[Any], options: Options) -> DBAPIConnection:
    """Open a connection as SQLAlchemy does by default."""
    connection: DBAPIConnection = dialect.connect(*arguments, **options)
    return connection


def connect_uncancelled(engine: AsyncEngine, connect: Connect = connect_of_dialect) -> None:
    """Have the engine finish every connection that it begins; close the connection of a cancelled caller once open."""

    def connect_in_task(
        dialect: Dialect, _record: ConnectionPoolEntry, arguments: list[Any], options: Options
    ) -> DBAPIConnection:
        connection: DBAPIConnection = await_only(_connect(connect, dialect, arguments, options))
        return connection

    event.listen(engine.sync_engine, "do_connect", connect_in_task)


async def _connect(connect: Connect, dialect: Dialect, arguments: list[Any], options: Options) -> DBAPIConnection:
    connecting = asyncio.create_task(greenlet_spawn(connect, dialect, arguments, options), name="database-connect")
    try:
        return await asyncio.shield(connecting)
    except asyncio.CancelledError:
        connecting.add_done_callback(_close_unwanted)
        raise


def _close_unwanted(connecting: asyncio.Task[DBAPIConnection]) -> None:
    if connecting.cancelled() or connecting.exception() is not None:
        return
    closing = asyncio.get_running_loop().create_task(greenlet_spawn(connecting.result().close))
    _closing.add(closing)
    closing.add_done_callback(_closing.discard)
