"""Files that batches read and produce; result files are the stored answers of the lines, in input order."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from sqlalchemy import ColumnElement, exists, func, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.models import OPEN, Batch, BatchLine
from moiety_platform.db.session import Database
from moiety_platform.files.models import StoredFile

LINES_AT_ONCE = 500
PIECE_BYTES = 1024 * 1024  # per read
ERASE_BYTES = 16 * PIECE_BYTES  # per transaction


@dataclass(frozen=True, slots=True)
class BatchFiles:
    """Implementation of `FileUsers` for batches."""

    database: Database
    erased: dict[str, int] = field(default_factory=dict)  # last erased line per file, so that no line is read twice

    async def user_of(self, session: AsyncSession, file_id: str) -> str | None:
        """Return the oldest batch that has not ended and reads this file; None if there is none."""
        reading = Batch.input_file_id == file_id, Batch.status.in_(OPEN)
        return await session.scalar(select(Batch.id).where(*reading).order_by(Batch.created_ms).limit(1))

    def is_needed(self) -> ColumnElement[bool]:
        """Return a condition for files that a batch that has not ended reads."""
        return exists().where(Batch.input_file_id == StoredFile.id, Batch.status.in_(OPEN))

    async def read(self, file: StoredFile) -> AsyncIterator[bytes]:
        """Yield the content in pieces of at most PIECE_BYTES, each in its own transaction. Raises Unavailable."""
        last = 0
        while True:
            async with self.database.read() as session:
                numbers, size = await _some_lines(session, file, last, PIECE_BYTES)
                whole = await _answers(session, file, numbers) if size <= PIECE_BYTES else b""
            if not numbers:
                return
            if whole:
                yield whole
            else:
                async for piece in self._read_large(file, numbers[0], size):
                    yield piece
            last = numbers[-1]

    async def _read_large(self, file: StoredFile, number: int, num_bytes: int) -> AsyncIterator[bytes]:
        """Yield the parts of one large line, including its end."""
        for start in range(0, num_bytes - 1, PIECE_BYTES):
            part = func.substr(BatchLine.answer, start + 1, PIECE_BYTES, type_=BatchLine.answer.type)
            line = BatchLine.batch_id == file.batch_id, BatchLine.number == number
            async with self.database.read() as session:
                piece = await session.scalar(select(part).where(*line))
            yield piece or b""  # empty if it was just deleted
        yield b"\n"

    async def erase_some(self, session: AsyncSession, file: StoredFile) -> int:
        """Erase some answers of a file; return their number. The counts of the lines stay."""
        numbers, _ = await _some_lines(session, file, self.erased.pop(file.id, 0), ERASE_BYTES)
        if not numbers:
            numbers, _ = await _some_lines(session, file, 0, ERASE_BYTES)
        if numbers:
            some = BatchLine.batch_id == file.batch_id, BatchLine.number.in_(numbers)
            await session.execute(update(BatchLine).where(*some).values(answer=None))
            self.erased[file.id] = numbers[-1]
        return len(numbers)


async def _some_lines(session: AsyncSession, file: StoredFile, last: int, max_bytes: int) -> tuple[list[int], int]:
    """Return the lines after `last` whose answers total at most `max_bytes`, but at least one; and their size.

    The list is empty at the end of the file.
    """
    following = BatchLine.number > last, BatchLine.answer.is_not(None)
    wanted = select(BatchLine.number, BatchLine.answer_bytes).where(*_of(file), *following)
    numbers: list[int] = []
    size = 0
    for number, num_bytes in await session.execute(wanted.order_by(BatchLine.number).limit(LINES_AT_ONCE)):
        if numbers and size + num_bytes > max_bytes:
            break
        numbers.append(number)
        size += num_bytes
    return numbers, size


async def _answers(session: AsyncSession, file: StoredFile, numbers: Sequence[int]) -> bytes:
    """Return the answers of these lines, each with a line's end."""
    chosen = BatchLine.batch_id == file.batch_id, BatchLine.number.in_(numbers)
    answers = await session.scalars(select(BatchLine.answer).where(*chosen).order_by(BatchLine.number))
    return b"".join((answer or b"") + b"\n" for answer in answers)


def _of(file: StoredFile) -> tuple[ColumnElement[bool], ...]:
    return BatchLine.batch_id == file.batch_id, BatchLine.state == file.line_state
