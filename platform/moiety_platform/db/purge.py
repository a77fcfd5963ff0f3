"""Deleting what has expired, a little at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.session import Database

PURGE_ROWS = 100  # in one transaction
PURGE_PAUSE_S = 0.05  # between two, so that others get to write


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
