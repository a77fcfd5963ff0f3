"""Deletion of a bounded number of rows in one transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import ColumnElement, delete, select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute


async def delete_some(
    session: AsyncSession, key: tuple[InstrumentedAttribute[Any], ...], condition: ColumnElement[bool], limit: int
) -> int:
    """Delete at most `limit` rows of a table, which `key` identifies; return their number."""
    found = [tuple(row) for row in await session.execute(select(*key).where(condition).limit(limit))]
    if found:
        await session.execute(delete(key[0].class_).where(tuple_(*key).in_(found)))
    return len(found)
