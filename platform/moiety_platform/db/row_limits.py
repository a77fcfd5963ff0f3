"""Limits on the number of rows of tables that administrators fill."""

from __future__ import annotations

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.errors import Conflict


async def require_room(session: AsyncSession, table: type[Base], most: int, noun: str, advice: str) -> None:
    """Raise Conflict if the table has `most` rows, which are called `noun`; `advice` says what to do then."""
    if (await session.scalar(select(func.count()).select_from(table)) or 0) >= most:
        raise Conflict(f"There are {most} {noun} already; {advice}.")
