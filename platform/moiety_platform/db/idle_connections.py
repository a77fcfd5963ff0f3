"""Check of pooled connections that were idle, before they are used again.

A connection that the server has closed is found without a message to the server. Only a connection that was idle for a
while is tested with a statement, because the test takes three messages in each direction, as many as most transactions.
"""

from __future__ import annotations

import time
from typing import Any

from sqlalchemy import event
from sqlalchemy.exc import InvalidatePoolError
from sqlalchemy.ext.asyncio import AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry

TEST_AFTER_S = 2.0
_RETURNED_S = "moiety_returned_s"


def check_idle_connections(engine: AsyncEngine) -> None:
    """Let the engine replace its connections when one is found broken. The driver is asyncpg."""
    event.listen(engine.sync_engine, "checkin", _note_return)
    event.listen(engine.sync_engine, "checkout", _check)


def _note_return(_connection: Any, record: ConnectionPoolEntry) -> None:
    record.info[_RETURNED_S] = time.monotonic()


def _check(connection: Any, record: ConnectionPoolEntry, _fairy: Any) -> None:
    returned_s = record.info.get(_RETURNED_S)
    if returned_s is None:  # just opened
        return
    if connection.driver_connection.is_closed():
        raise InvalidatePoolError
    if time.monotonic() - returned_s < TEST_AFTER_S:
        return
    try:
        connection.ping()
    except connection.dbapi.Error as error:
        raise InvalidatePoolError from error
