"""Claims on lines and batches: leases on the database's clock, within the caller's transaction.

Workers that claim at the same time get different lines and do not wait for each other (SKIP LOCKED on PostgreSQL;
SQLite has one writer at a time). A claim that is not renewed can be claimed again: a killed worker's lines wait for the
end of the lease; a stopping worker gives its lines back at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.models import OPEN, Batch, BatchLine, BatchStatus, LineState
from moiety_platform.files.models import StoredFile
from moiety_platform.files.store import Now
from moiety_wire.shared_fields import copy_fields

MAX_OPEN_BATCHES = 1000  # per poll

LineKey = tuple[str, int]  # (batch, number)


@dataclass(frozen=True, slots=True)
class OpenBatch:
    """A batch that has not ended, as workers see it.

    `is_free`: no worker validates or finalizes it now. `is_checked`: its lines were validated before it was created,
    and not all of them may be stored yet.
    """

    id: str
    tenant_id: str
    key_id: str
    endpoint: str
    input_file_id: str
    status: str
    is_due: bool  # its completion window is over
    is_free: bool
    is_checked: bool = False
    end_user: str | None = None


@dataclass(frozen=True, slots=True)
class ClaimedLine:
    """A claimed line to answer: its place in the object of the batch's input file.

    `input_key` is None while an earlier version's content of the file has not moved to the object store.
    """

    batch: OpenBatch
    number: int
    custom_id: str
    num_refusals: int
    num_failures: int
    start: int
    num_bytes: int
    input_key: str | None

    @property
    def key(self) -> LineKey:
        return self.batch.id, self.number


async def open_batches(session: AsyncSession, now: Now) -> list[OpenBatch]:
    """Return the batches that have not ended.

    The oldest batch of each tenant precedes any tenant's second, so that many batches of one tenant do not hide
    another's.
    """
    turn = func.row_number().over(partition_by=Batch.tenant_id, order_by=(Batch.created_ms, Batch.id))
    wanted = select(Batch, now()).where(Batch.status.in_(OPEN))
    rows = await session.execute(wanted.order_by(turn, Batch.created_ms, Batch.id).limit(MAX_OPEN_BATCHES))
    return [
        copy_fields(
            batch,
            OpenBatch,
            is_due=batch.expires_ms <= moment,
            is_free=batch.available_ms <= moment,
            # of others, the total is that of the ended lines until all are stored
            is_checked=batch.in_progress_ms is None and batch.completed + batch.failed < batch.total,
        )
        for batch, moment in rows
    ]


async def claim_batch(session: AsyncSession, batch: OpenBatch, lease_ms: int, now: Now) -> bool:
    """Claim a batch for validation or finalization; return whether that succeeded.

    It fails if another worker has the batch, or its status has changed.
    """
    free = Batch.id == batch.id, Batch.status == batch.status, Batch.available_ms <= now()
    return (
        await session.scalar(update(Batch).where(*free).values(available_ms=now() + lease_ms).returning(Batch.id))
        is not None
    )


async def claim_lines(
    session: AsyncSession, batch: OpenBatch, owner: str, limit: int, lease_ms: int, now: Now
) -> list[ClaimedLine]:
    """Claim at most `limit` free lines, and return them in file order."""
    mine = BatchLine.batch_id == batch.id, BatchLine.state == LineState.PENDING
    running = select(Batch.id).where(Batch.id == batch.id, Batch.status == BatchStatus.IN_PROGRESS).exists()
    free = (
        select(BatchLine.number)
        .where(*mine, BatchLine.available_ms <= now(), running)
        .order_by(BatchLine.number)
        .limit(limit)
        .with_for_update(skip_locked=True)
    )
    numbers = (await session.scalars(free)).all()
    if not numbers:
        return []
    chosen = BatchLine.batch_id == batch.id, BatchLine.number.in_(numbers)
    await session.execute(update(BatchLine).where(*chosen).values(available_ms=now() + lease_ms, owner=owner))
    key = select(StoredFile.object_key).where(StoredFile.id == batch.input_file_id).scalar_subquery()
    places = BatchLine.start, BatchLine.num_bytes, key
    columns = BatchLine.number, BatchLine.custom_id, BatchLine.num_refusals, BatchLine.num_failures, *places
    rows = await session.execute(select(*columns).where(*chosen).order_by(BatchLine.number))
    return [ClaimedLine(batch, *row) for row in rows]


async def renew_lines(
    session: AsyncSession, keys: Sequence[LineKey], owner: str, lease_ms: int, now: Now
) -> set[LineKey]:
    """Extend the leases of these lines; return those that still belong to the owner."""
    if not keys:
        return set()
    wanted = tuple_(BatchLine.batch_id, BatchLine.number).in_(keys)
    mine = wanted, BatchLine.owner == owner, BatchLine.state == LineState.PENDING
    columns = BatchLine.batch_id, BatchLine.number
    # in the common lock order
    await session.execute(select(*columns).where(*mine).order_by(*columns).with_for_update())
    renewed = update(BatchLine).where(*mine).values(available_ms=now() + lease_ms).returning(*columns)
    return {(batch_id, number) for batch_id, number in await session.execute(renewed)}
