"""Deletion of an ended batch with its files, on its owner's request.

The batch's row goes last, so that a deletion that was cut off can be repeated.
"""

from __future__ import annotations

from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.models import OPEN, Batch, BatchLine
from moiety_platform.db.session import Database
from moiety_platform.errors import Conflict
from moiety_platform.files.models import FileState, StoredFile

LINES_AT_ONCE = 500


async def delete_batch(database: Database, batch_id: str, *, with_input: bool) -> None:
    """Delete a batch, its lines and its result files, and with `with_input` its input file. Raises Conflict.

    An input file that another batch has too is kept.
    """
    async with database.write() as session:
        batch = await session.get(Batch, batch_id, with_for_update=True)
        if batch is None:
            return
        if batch.status in OPEN:
            raise Conflict(
                "the batch has not ended; cancel it, wait until its 'processing_status' is 'ended', and delete it then",
                code="batch_not_over",
            )
        files = [batch.output_file_id, batch.error_file_id]
        if with_input and not await _is_read_by_others(session, batch):
            files.append(batch.input_file_id)
        gone = StoredFile.id.in_([one for one in files if one is not None])
        await session.execute(update(StoredFile).where(gone).values(state=FileState.DELETED))
    while True:
        async with database.write() as session:
            if not await _delete_some_lines(session, batch_id):
                await session.execute(delete(Batch).where(Batch.id == batch_id))
                return


async def _is_read_by_others(session: AsyncSession, batch: Batch) -> bool:
    """Return whether there is another batch with this batch's input file. The file is locked before."""
    await session.execute(select(StoredFile.id).where(StoredFile.id == batch.input_file_id).with_for_update())
    others = select(Batch.id).where(Batch.input_file_id == batch.input_file_id, Batch.id != batch.id).limit(1)
    return await session.scalar(others) is not None


async def _delete_some_lines(session: AsyncSession, batch_id: str) -> int:
    of_batch = BatchLine.batch_id == batch_id
    numbers = (await session.scalars(select(BatchLine.number).where(of_batch).limit(LINES_AT_ONCE))).all()
    await session.execute(delete(BatchLine).where(of_batch, BatchLine.number.in_(numbers)))
    return len(numbers)
