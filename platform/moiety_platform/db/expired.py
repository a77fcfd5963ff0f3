"""What is past its time, to be deleted a little at a time."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import ColumnElement, select
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute


async def oldest_expired(
    session: AsyncSession,
    ids: InstrumentedAttribute[str],
    expires_ms: InstrumentedAttribute[int],
    now_ms: ColumnElement[int],
    limit: int,
) -> Sequence[str]:
    """The ids of at most `limit` rows whose time was over by the database's clock, the oldest first. They are locked;
    those that another process has locked are left to it."""
    now = await session.scalar(select(now_ms))  # as a value, so that the index serves
    expired = select(ids).where(expires_ms <= now).order_by(expires_ms).limit(limit)
    return (await session.scalars(expired.with_for_update(skip_locked=True))).all()
