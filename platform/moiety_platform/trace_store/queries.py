"""Queries of traces. The database does all the work; a caller of one tenant gets a store restricted to its rows."""

from __future__ import annotations

import math
import re
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import datetime

from sqlalchemy import ColumnElement, Select, literal_column, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import in_rows
from moiety_platform.db.failures import RETRY_AFTER_S, UNMIGRATED
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, Unavailable
from moiety_platform.trace_store.models import IS_UNSUCCESSFUL, UNSUCCESSFUL, SpanRecord, TraceRecord
from moiety_platform.trace_store.schemas import LinkedSpan, SpanView, TraceDetail, TracePage, TraceView

MAX_SPANS = 2000
MAX_LINKED = 500
NO_STORE = "no_trace_store"

_TRACE_ID = re.compile(r"[0-9a-f]{32}", re.ASCII)


@dataclass(frozen=True, slots=True)
class TraceFilter:
    """Filter of traces: requests that began in [since, until), with these properties where given.

    `reason` is the scheduler's reason, an error's code, or the reason why the trace was kept.
    """

    since: datetime
    until: datetime
    equal: dict[str, str]
    reason: str | None = None
    min_ms: float | None = None
    max_ms: float | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """Return the filter as SQL conditions."""
        table = TraceRecord
        found = [table.started_at >= self.since, table.started_at < self.until]
        found += [getattr(table, name) == value for name, value in self.equal.items()]
        if self.equal.get("outcome") in UNSUCCESSFUL:  # SQLite can use the index only with the same text
            found.append(literal_column(f"({IS_UNSUCCESSFUL})"))
        if self.reason is not None:
            found.append(or_(*(column == self.reason for column in (table.reason, table.error_code, table.kept_for))))
        if self.min_ms is not None:
            found.append(table.duration_ms >= self.min_ms)
        if self.max_ms is not None:
            found.append(table.duration_ms < self.max_ms)
        return found

    def statement(self) -> Select[TraceRecord]:
        """Return the query of all traces that match."""
        return select(TraceRecord).where(*self.conditions())


def parse_ms(text: str | None, param: str) -> float | None:
    """Return the milliseconds. Raises BadRequest."""
    if text is None:
        return None
    try:
        value = float(text) if text.isascii() and len(text) <= 32 else math.nan
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= 0):
        raise BadRequest(
            f"'{param}' must be a number of milliseconds such as 250 or 0.5, not {text[:64]!r}.", param=param
        )
    return value


@asynccontextmanager
async def reading(traces: Database) -> AsyncIterator[AsyncSession]:
    """Open a read transaction. Raises Unavailable, with a code of its own where there is no trace store."""
    try:
        async with traces.read() as session:
            yield session
    except Unavailable as error:
        if error.code != UNMIGRATED:
            raise
        raise Unavailable(
            "The trace store does not exist, or has the schema of another release; start it with "
            "`moiety serve`, or run `moiety traces --migrate`.",
            code=NO_STORE,
            retry_after_s=RETRY_AFTER_S,
        ) from error


async def find_traces(session: AsyncSession, trace_filter: TraceFilter, page: PageRequest) -> TracePage:
    """Return a page of traces, newest first."""
    records, next_cursor = await read_page(
        session, trace_filter.statement(), page, TraceRecord.started_at, TraceRecord.span_id, newest_first=True
    )
    return TracePage([TraceView.of(record) for record in records], next_cursor)


async def read_trace(session: AsyncSession, trace_id: str, hidden: Collection[str]) -> TraceDetail:
    """Return all spans of a trace, and the kept spans of other traces that they link to. Raises NotFound.

    Attributes named in `hidden` are left out.
    """
    known = trace_id if _TRACE_ID.fullmatch(trace_id) else ""  # an impossible id is looked up as an empty one
    statement = select(SpanRecord).where(SpanRecord.trace_id == known)
    statement = statement.order_by(SpanRecord.start_ns, SpanRecord.end_ns.desc(), SpanRecord.span_id).limit(
        MAX_SPANS + 1
    )
    records = (await session.scalars(statement)).all()
    if not records:
        raise NotFound(
            f"There is no trace {trace_id[:64]!r}, or it was not sampled; list the stored traces with GET "
            "/admin/v1/traces.",
            code="trace_not_found",
        )
    ids = {(link["trace_id"], link["span_id"]) for record in records for link in record.links}
    elsewhere = sorted(one for one in ids if one[0] != trace_id)
    linked = await _read_spans(session, elsewhere[:MAX_LINKED])
    return TraceDetail(
        trace_id,
        [SpanView.of(record, hidden) for record in records[:MAX_SPANS]],
        [LinkedSpan(record.trace_id, SpanView.of(record, hidden)) for record in linked],
        truncated=len(records) > MAX_SPANS or len(elsewhere) > MAX_LINKED,
    )


async def _read_spans(session: AsyncSession, ids: Sequence[tuple[str, str]]) -> Sequence[SpanRecord]:
    """Return the spans with these ids that are kept, by their start."""
    if not ids:
        return ()
    statement = select(SpanRecord).where(in_rows(session, (SpanRecord.trace_id, SpanRecord.span_id), ids))
    return (await session.scalars(statement.order_by(SpanRecord.start_ns, SpanRecord.trace_id))).all()
