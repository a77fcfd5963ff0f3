"""Purge of old batches with their lines, in small batches within the caller's transaction.

A batch is kept as long as one of its result files, because they consist of its lines.
"""

from __future__ import annotations

from sqlalchemy import delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.models import OPEN, Batch, BatchLine, BatchStatus
from moiety_platform.files.models import StoredFile
from moiety_platform.files.store import Now, read_clock

LINES_AT_ONCE = 500
_ENDED = tuple(status for status in BatchStatus if status not in OPEN)


async def purge_batches(session: AsyncSession, *, keep_ms: int, now: Now) -> int:
    """Delete some lines of an ended batch older than `keep_ms`, or finally the batch; return the number of rows."""
    has_files = exists().where(StoredFile.id.in_((Batch.output_file_id, Batch.error_file_id)))
    old = Batch.status.in_(_ENDED), Batch.created_ms < await read_clock(session, now) - keep_ms
    wanted = select(Batch.id).where(*old, ~has_files).order_by(Batch.created_ms).limit(1)
    batch_id = await session.scalar(wanted.with_for_update(of=Batch, skip_locked=True))
    if batch_id is None:
        return 0
    of_batch = BatchLine.batch_id == batch_id
    numbers = (await session.scalars(select(BatchLine.number).where(of_batch).limit(LINES_AT_ONCE))).all()
    if numbers:
        await session.execute(delete(BatchLine).where(of_batch, BatchLine.number.in_(numbers)))
        return len(numbers)
    await session.execute(delete(Batch).where(Batch.id == batch_id))
    return 1
