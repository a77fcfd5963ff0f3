"""Work on the store that a process does again and again, for as long as it lives."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import structlog
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable

PURGE_ROWS = 100  # in one transaction
PURGE_PAUSE_S = 0.05  # between two, so that others get to write

log = structlog.get_logger(__name__)


async def every(seconds: float, name: str, work: Callable[[], Awaitable[object]]) -> None:
    """Do it every so often, without end; a store that is away, or a defect, costs one round."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Unavailable as error:
            log.warning("store_away", what=name, reason=str(error))
        except Exception:  # the root of a task that lives as long as the process: told, and tried again
            log.exception("round_failed", what=name)


async def purge_all(database: Database, purge: Callable[[AsyncSession, int], Awaitable[int]]) -> int:
    """Have `purge` delete what has expired, in small transactions; how many rows. Raises Unavailable."""
    total = 0
    while True:
        async with database.write() as session:
            num_deleted = await purge(session, PURGE_ROWS)
        total += num_deleted
        if num_deleted < PURGE_ROWS:
            return total
        await asyncio.sleep(PURGE_PAUSE_S)
