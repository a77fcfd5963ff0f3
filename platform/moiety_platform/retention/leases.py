"""Leases of retention jobs within the caller's transaction: one gateway runs a job, once per interval.

The gateway that takes a job locks its row to the end of the transaction, so a gateway that stalled and lost its lease
cannot run the job beside another.
"""

from __future__ import annotations

from collections.abc import Callable, Collection

from sqlalchemy import ColumnElement, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.retention.models import RetentionJobRecord

Now = Callable[[], ColumnElement[int]]


async def due(session: AsyncSession, names: Collection[str], now: Now) -> set[str]:
    """Return the names of the jobs that are due and that no gateway runs."""
    others = select(RetentionJobRecord.name).where(RetentionJobRecord.available_ms > now())
    return set(names) - set(await session.scalars(others))


async def claim_job(session: AsyncSession, name: str, owner: str, lease_ms: int, now: Now) -> bool:
    """Take or extend the lease of a job; return False if another gateway holds it."""
    return bool(await claim_jobs(session, [name], owner, lease_ms, now))


async def claim_jobs(session: AsyncSession, names: Collection[str], owner: str, lease_ms: int, now: Now) -> set[str]:
    """Take or extend the leases of jobs; return the names of those that no other gateway holds."""
    rows = [{"name": name, "owner": owner, "available_ms": now() + lease_ms} for name in sorted(names)]
    insert = insert_into(session, RetentionJobRecord).values(rows)
    mine = {"owner": owner, "available_ms": now() + lease_ms}
    free = or_(RetentionJobRecord.available_ms <= now(), RetentionJobRecord.owner == owner)
    taken = insert.on_conflict_do_update(index_elements=[RetentionJobRecord.name], set_=mine, where=free)
    return set(await session.scalars(taken.returning(RetentionJobRecord.name)))


async def delay_jobs(session: AsyncSession, names: Collection[str], pause_ms: int, now: Now) -> None:
    """Mark the jobs as done for the interval. Call it in the transaction that has taken the leases."""
    done = {"owner": None, "available_ms": now() + pause_ms}
    await session.execute(update(RetentionJobRecord).where(RetentionJobRecord.name.in_(sorted(names))).values(done))
