"""Selection of expired rows, for deletion in small batches."""

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
    """Return the ids of at most `limit` rows that have expired by the database's clock, the oldest first.

    The rows are locked; rows that another process has locked are skipped.
    """
    now = await session.scalar(select(now_ms))  # as a value, so that the index is used
    expired = select(ids).where(expires_ms <= now).order_by(expires_ms).limit(limit)
    return (await session.scalars(expired.with_for_update(skip_locked=True))).all()
