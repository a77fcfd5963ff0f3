"""The files that batches make and use: their lines' answers in the order of the input, each kept once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass

from sqlalchemy import ColumnElement, exists, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.models import OPEN, Batch, BatchLine
from moiety_platform.db.session import Database
from moiety_platform.files.models import StoredFile

LINES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """`FileUsers` as batches fulfil it."""

    database: Database

    async def user_of(self, session: AsyncSession, file_id: str) -> str | None:
        """The oldest batch that has not ended and reads this file."""
        reading = Batch.input_file_id == file_id, Batch.status.in_(OPEN)
        return await session.scalar(select(Batch.id).where(*reading).order_by(Batch.created_ms).limit(1))

    def is_needed(self) -> ColumnElement[bool]:
        """Whether a batch that has not ended reads the file."""
        return exists().where(Batch.input_file_id == StoredFile.id, Batch.status.in_(OPEN))

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Some lines at a time, each time in a transaction of its own. Raises Unavailable."""
        last = 0
        while True:
            async with self.database.read() as session:
                following = BatchLine.number > last, BatchLine.answer.is_not(None)
                wanted = select(BatchLine.number, BatchLine.answer).where(*_of(file), *following)
                rows = (await session.execute(wanted.order_by(BatchLine.number).limit(LINES_AT_ONCE))).all()
            if not rows:
                return
            last = rows[-1][0]
            yield b"".join((answer or b"") + b"\n" for _, answer in rows)

    async def erase_some(self, session: AsyncSession, file: StoredFile) -> int:
        """Forget some answers; how many. What a line came to stays."""
        wanted = select(BatchLine.number).where(*_of(file), BatchLine.answer.is_not(None)).limit(LINES_AT_ONCE)
        numbers = (await session.scalars(wanted)).all()
        if numbers:
            some = BatchLine.batch_id == file.batch_id, BatchLine.number.in_(numbers)
            await session.execute(update(BatchLine).where(*some).values(answer=None))
        return len(numbers)


def _of(file: StoredFile) -> tuple[ColumnElement[bool], ...]:
    return BatchLine.batch_id == file.batch_id, BatchLine.state == file.line_state
