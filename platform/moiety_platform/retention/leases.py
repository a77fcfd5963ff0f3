"""Whose turn a chore is, within the caller's transaction: of all gateways one is at a chore, and once in each interval.

Whoever takes a chore locks its row to the end of the transaction, so a gateway that stood still and was taken for dead
cannot be at it beside another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.retention.models import RetentionJobRecord

Now = Callable[[], ColumnElement[int]]


async def due(session: AsyncSession, names: Collection[str], now: Now) -> set[str]:
    """Those of these chores that nobody is at, and that are not done for now."""
    others = select(RetentionJobRecord.name).where(RetentionJobRecord.available_ms > now())
    return set(names) - set(await session.scalars(others))


async def take(session: AsyncSession, name: str, owner: str, lease_ms: int, now: Now) -> bool:
    """Be the one that is at it, or go on to be; False if somebody else is."""
    insert = insert_into(session, RetentionJobRecord).values(name=name, owner=owner, available_ms=now() + lease_ms)
    mine = {"owner": owner, "available_ms": now() + lease_ms}
    free = or_(RetentionJobRecord.available_ms <= now(), RetentionJobRecord.owner == owner)
    taken = insert.on_conflict_do_update(index_elements=[RetentionJobRecord.name], set_=mine, where=free)
    return await session.scalar(taken.returning(RetentionJobRecord.name)) is not None


async def rest(session: AsyncSession, name: str, pause_ms: int, now: Now) -> None:
    """It is done for now. Call it in the transaction that has taken it."""
    done = {"owner": None, "available_ms": now() + pause_ms}
    await session.execute(update(RetentionJobRecord).where(RetentionJobRecord.name == name).values(done))
