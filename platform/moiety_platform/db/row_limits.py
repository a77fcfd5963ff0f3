"""Limits on the number of rows of tables that administrators fill."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import Base
from moiety_platform.errors import Conflict

Row = TypeVar("Row", bound=Base)


async def get_or_add(
    session: AsyncSession, table: type[Row], key: Mapping[str, Any], most: int, noun: str, advice: str
) -> Row:
    """Return the row with this primary key, or a new one. Raises Conflict as `require_room` does."""
    row = await session.get(table, key)
    if row is None:
        await require_room(session, table, most, noun, advice)
        row = table(**key)
        session.add(row)
    return row


async def require_room(session: AsyncSession, table: type[Base], most: int, noun: str, advice: str) -> None:
    """Raise Conflict if the table has `most` rows, which are called `noun`; `advice` says what to do then."""
    if (await session.scalar(select(func.count()).select_from(table)) or 0) >= most:
        raise Conflict(f"There are {most} {noun} already; {advice}.")
