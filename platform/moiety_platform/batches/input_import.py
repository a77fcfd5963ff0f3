"""Import of a batch's input file: its validation, line by line, and the storage of its lines in pieces.

The written rows are a function of the file, which is immutable, so they may be written twice: the worker that claims
the batch after a killed validation starts again.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import delete, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.batches.claims import OpenBatch
from moiety_platform.batches.closing import CLOSABLE, refuse_batch
from moiety_platform.batches.endpoints import ENDPOINTS
from moiety_platform.batches.input_lines import Checker, GoodLine, RawLine, Splitter
from moiety_platform.batches.line_limits import BatchLineLimits
from moiety_platform.batches.models import Batch, BatchLine, BatchStatus, LineState
from moiety_platform.db.dialect import insert_into
from moiety_platform.db.session import Database
from moiety_platform.errors import Gone
from moiety_platform.files.contents import FileContents
from moiety_platform.files.store import Now
from moiety_platform.object_storage.store import PIECE_BYTES

LINES_AT_ONCE = 250

log = structlog.get_logger(__name__)


@dataclass(eq=False)
class InputImport:
    """Validation and import of one batch by the worker that has claimed it.

    Lines that were checked before are only imported.
    """

    database: Database
    contents: FileContents
    batch: OpenBatch
    limits: BatchLineLimits
    lease_ms: int
    now: Now

    def __post_init__(self) -> None:
        self._splitter = Splitter(sys.maxsize if self.batch.is_checked else self.limits.max_line_bytes)
        self._checker = Checker(ENDPOINTS[self.batch.endpoint], self.limits, checked=self.batch.is_checked)
        self._statuses: Sequence[BatchStatus] = (BatchStatus.VALIDATING,)  # in which lines may be added
        self._good: list[GoodLine] = []

    async def run(self) -> None:
        """Validate the whole file; then the batch is in progress, or has failed.

        Stops early if the batch was cancelled meanwhile. Raises Unavailable.
        """
        if not await self._read():
            return
        if self._checker.errors:
            await self._refuse()
        else:
            await self._accept()

    async def add_missing(self) -> None:
        """Import the lines of a checked batch that is closed before all are stored, so that each has a result.

        Raises Unavailable.
        """
        self._statuses = CLOSABLE
        if await self._read():
            await self._add_lines()

    async def _read(self) -> bool:
        """Read the whole file, and add its lines while none is wrong; return False if they may not be added."""
        try:
            async for data in self._pieces():
                await asyncio.to_thread(self._check, self._splitter.take(data))
                if self._checker.has_too_many_errors:
                    return True
                if not self._checker.errors and not await self._add_lines():
                    return False
        except Gone as error:
            self._checker.complain(None, error.code, error.message)
        await asyncio.to_thread(self._check, self._splitter.finish())
        self._checker.finish()
        return True

    async def _pieces(self) -> AsyncIterator[bytes]:
        """Yield the input file piece by piece. Raises Gone or Unavailable."""
        key, num_bytes = await self.contents.locate(self.batch.input_file_id)
        for start in range(0, num_bytes, PIECE_BYTES):
            yield await self.contents.read_range(key, start, min(PIECE_BYTES, num_bytes - start))

    def _check(self, lines: Iterable[RawLine]) -> None:
        for line in lines:
            good = self._checker.check(line)
            if good is not None:
                self._good.append(good)
            if self._checker.has_too_many_errors:
                return

    async def _add_lines(self) -> bool:
        """Insert the collected lines; return False if the batch takes no more of them."""
        while self._good:
            some, self._good = self._good[:LINES_AT_ONCE], self._good[LINES_AT_ONCE:]
            async with self.database.write() as session:
                if not await self._renew(session):
                    return False
                await session.execute(
                    insert_into(session, BatchLine).on_conflict_do_nothing(), _rows(self.batch.id, some)
                )
        return True

    async def _renew(self, session: AsyncSession) -> bool:
        """Extend the claim and lock the batch, so that nothing is added after a cancellation."""
        mine = Batch.id == self.batch.id, Batch.status.in_(self._statuses)
        renewed = update(Batch).where(*mine).values(available_ms=self.now() + self.lease_ms).returning(Batch.id)
        return await session.scalar(renewed) is not None

    async def _accept(self) -> None:
        if not await self._add_lines():
            return
        values = {"status": BatchStatus.IN_PROGRESS, "in_progress_ms": self.now(), "total": self._checker.num_lines}
        mine = Batch.id == self.batch.id, Batch.status == BatchStatus.VALIDATING
        async with self.database.write() as session:
            await session.execute(update(Batch).where(*mine).values(values))
        log.info("batch_in_progress", batch_id=self.batch.id, lines=self._checker.num_lines)

    async def _refuse(self) -> None:
        """Fail the batch, then delete its lines, which no worker takes any more."""
        async with self.database.write() as session:
            if not await refuse_batch(session, self.batch.id, self._checker.errors, self.now):
                return
        log.info("batch_refused", batch_id=self.batch.id, errors=len(self._checker.errors))
        while await self._drop_lines():
            pass

    async def _drop_lines(self) -> bool:
        of_batch = BatchLine.batch_id == self.batch.id
        async with self.database.write() as session:
            numbers = (await session.scalars(select(BatchLine.number).where(of_batch).limit(LINES_AT_ONCE))).all()
            await session.execute(delete(BatchLine).where(of_batch, BatchLine.number.in_(numbers)))
        return bool(numbers)


def _rows(batch_id: str, lines: Sequence[GoodLine]) -> list[dict[str, object]]:
    return [
        {
            "batch_id": batch_id,
            "number": line.number,
            "custom_id": line.custom_id,
            "start": line.start,
            "num_bytes": line.num_bytes,
            "state": LineState.PENDING,
            "available_ms": 0,
            "num_refusals": 0,
            "num_failures": 0,
            "answer_bytes": 0,
        }
        for line in lines
    ]
