"""Opens connections in tasks of their own, so that a caller that is cancelled meanwhile leaves none open.

A driver that is cancelled while it connects can lose the connection that its thread or server has just made: nobody
closes it, and it keeps its descriptors until the garbage collector finds it.
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

_closing: set[asyncio.Task[None]] = set()


def connect_uncancelled(engine: AsyncEngine, prepare: Callable[[Options], None] = lambda _: None) -> None:
    """Have the engine finish every connection that it begins: one whose caller was cancelled is closed as soon as it is
    open. `prepare` changes the driver's options before each."""

    def connect(
        dialect: Dialect, _record: ConnectionPoolEntry, arguments: list[Any], options: Options
    ) -> DBAPIConnection:
        prepare(options)
        connection: DBAPIConnection = await_only(_connect(dialect, arguments, options))
        return connection

    event.listen(engine.sync_engine, "do_connect", connect)


async def _connect(dialect: Dialect, arguments: list[Any], options: Options) -> DBAPIConnection:
    connecting = asyncio.create_task(greenlet_spawn(dialect.connect, *arguments, **options), name="database-connect")
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
