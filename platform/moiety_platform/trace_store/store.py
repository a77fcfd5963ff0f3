"""Writes traces and deletes old ones within the caller's transaction."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from sqlalchemy import ColumnElement, delete, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkInsert, in_rows
from moiety_platform.trace_store.models import SpanRecord, TraceRecord
from moiety_platform.trace_store.rows import Rows

ROWS_AT_ONCE = 1000

Now = Callable[[], ColumnElement[int]]

# a span that was sent twice, because its sender did not get the response, is stored once
_insert_spans = BulkInsert(SpanRecord, lambda insert: insert.on_conflict_do_nothing())
_insert_traces = BulkInsert(TraceRecord, lambda insert: insert.on_conflict_do_nothing())


async def insert_rows(session: AsyncSession, rows: Rows) -> None:
    """Insert the rows that do not exist yet."""
    await _insert_spans(session, rows.spans)
    await _insert_traces(session, rows.traces)


def purge_of(table: type[SpanRecord | TraceRecord], keep_ms: int, now: Now) -> Callable[[AsyncSession], Awaitable[int]]:
    """Return a job that deletes some of the table's rows older than `keep_ms`, the oldest first.

    The job returns the number of deleted rows.
    """

    async def purge(session: AsyncSession) -> int:
        before = int(await session.scalar(select(now())) or 0) - keep_ms
        old = select(table.trace_id, table.span_id).where(table.stored_ms < before)
        oldest = old.order_by(table.stored_ms).limit(ROWS_AT_ONCE).with_for_update(skip_locked=True)
        keys = [tuple(row) for row in await session.execute(oldest)]
        if keys:
            await session.execute(delete(table).where(in_rows(session, (table.trace_id, table.span_id), keys)))
        return len(keys)

    return purge
