"""Batched writer of spans to the database, with a bounded queue.

Fails open towards the gateways: spans that exceed the queue are refused, and their sender can retry or drop them.
"""

from __future__ import annotations

import asyncio
from collections import deque

import structlog

from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.periodic_task import PeriodicTask
from moiety_platform.trace_store.rows import Rows
from moiety_platform.trace_store.store import insert_rows

BATCH_SPANS = 1000
INTERVAL_S = 0.5
PAUSE_S = 1.0  # while the database is down
LAST_S = 5.0

log = structlog.get_logger(__name__)


class TraceWriter:
    """Queue and writer of spans. Owned by the entry point; for one event loop. A kill loses the queued spans."""

    def __init__(self, database: Database, max_spans: int) -> None:
        self.max_spans = max_spans
        self.num_stored = 0
        self.num_dropped = 0  # refused by the database
        self._database = database
        self._queue: deque[Rows] = deque()
        self._num_queued = 0
        self._rounds = PeriodicTask("traces", self._write_all, INTERVAL_S, pause_s=PAUSE_S)

    async def start(self) -> None:
        self._rounds.start()

    async def stop(self) -> None:
        """Store the rest, within `LAST_S`."""
        await self._rounds.stop()
        try:
            async with asyncio.timeout(LAST_S):
                await self._write_all()
        except (TimeoutError, Unavailable) as error:
            log.warning(
                "spans_lost",
                spans=self._num_queued,
                reason=str(error) or "the database does not answer",
                advice="restore the database of the trace store",
            )

    def put(self, rows: Rows) -> bool:
        """Queue the rows; return False if the queue is full."""
        if self._num_queued + len(rows.spans) > self.max_spans:
            return False
        self._queue.append(rows)
        self._num_queued += len(rows.spans)
        if self._num_queued >= BATCH_SPANS:
            self._rounds.wake()
        return True

    async def _write_all(self) -> None:
        """Write all queued rows. Raises Unavailable; rows that were not stored stay in the queue."""
        while self._queue:
            batch, num_requests = Rows(), 0
            for rows in self._queue:
                if batch.spans and len(batch.spans) + len(rows.spans) > BATCH_SPANS:
                    break
                batch.spans += rows.spans
                batch.traces += rows.traces
                num_requests += 1
            stored = await self._write(batch)
            for _ in range(num_requests):
                self._queue.popleft()
            self._num_queued -= len(batch.spans)
            self.num_stored += len(batch.spans) if stored else 0

    async def _write(self, batch: Rows) -> bool:
        """Write a batch; return False where the database refuses it for good."""
        try:
            async with self._database.write() as session:
                await insert_rows(session, batch)
        except Unavailable:
            raise
        except Exception:  # top level of a batch: logged, and not retried
            log.exception("spans_refused", spans=len(batch.spans))
            self.num_dropped += len(batch.spans)
            return False
        return True
