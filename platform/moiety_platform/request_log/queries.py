"""Search in the request log. The database does all the work; a caller of one tenant gets restricted stores."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import ColumnElement, Select, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest, NotFound, Unavailable
from moiety_platform.request_log.schemas import LoggedRequest, LoggedRequestPage
from moiety_platform.trace_store.models import TraceRecord
from moiety_platform.trace_store.queries import reading
from moiety_platform.usage.attribution import tags_of
from moiety_platform.usage.models import IS_UNSUCCESSFUL, UsageRecord
from moiety_platform.usage.queries import UsageFilter
from moiety_wire.classes import SPECULATIVE_PREFILL
from moiety_wire.shared_fields import copy_fields

SLO_STATES = ("attained", "missed", "none")
FIRST_ERROR_STATUS = 400

_STATUS = re.compile(r"([1-5])(?:xx|[0-9]{2})", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class StatusRange:
    """HTTP statuses from `low` to `high`, inclusive."""

    low: int
    high: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestSearch:
    """Filter of the request log: requests of the usage filter, with these properties where given."""

    usage: UsageFilter
    request_id: str | None = None
    status: StatusRange | None = None
    error_code: str | None = None
    route: str | None = None
    slo: str | None = None  # one of SLO_STATES
    min_ms: float | None = None

    @property
    def is_unsuccessful(self) -> bool:
        """True if only requests of the index of unsuccessful ones can match."""
        is_error = self.status is not None and self.status.low >= FIRST_ERROR_STATUS
        return is_error or self.error_code is not None or self.usage.outcome in ("failed", "rejected", "disconnected")

    def conditions(self, dialect: str) -> list[ColumnElement[bool]]:
        """Return the filter as SQL conditions."""
        row = UsageRecord
        found = [
            row.started_at >= self.usage.since,
            row.started_at < self.usage.until,
            row.endpoint != SPECULATIVE_PREFILL,
            *self.usage.row_conditions(dialect),
        ]
        if self.request_id is not None:
            found.append(row.request_id == self.request_id)
        if self.status is not None:
            found.append(row.http_status.between(self.status.low, self.status.high))
        if self.error_code is not None:
            found.append(row.error_code == self.error_code)
        if self.route is not None:
            found.append(row.route == self.route)
        if self.slo is not None:
            attained = {"attained": True, "missed": False, "none": None}[self.slo]
            found.append(row.slo_attained.is_(attained))
        if self.min_ms is not None:
            found.append(row.duration_ms >= self.min_ms)
        if self.is_unsuccessful:  # SQLite can use the index only with the same text
            found.append(literal_column(f"({IS_UNSUCCESSFUL})"))
        return found

    def statement(self, dialect: str) -> Select[UsageRecord]:
        """Return the query of all requests that match."""
        return select(UsageRecord).where(*self.conditions(dialect))


def parse_status(text: str | None) -> StatusRange | None:
    """Return the statuses of `429` or `4xx`. Raises BadRequest."""
    if text is None:
        return None
    if (found := _STATUS.fullmatch(text)) is None:
        raise BadRequest(
            f"'status' must be a status such as 429, or a class such as 4xx, not {text[:64]!r}.", param="status"
        )
    if not text[1:].isdigit():
        return StatusRange(int(found[1]) * 100, int(found[1]) * 100 + 99)
    return StatusRange(int(text), int(text))


def parse_slo(text: str | None) -> str | None:
    """Return one of SLO_STATES. Raises BadRequest."""
    if text is not None and text not in SLO_STATES:
        raise BadRequest(f"'slo' must be one of: {', '.join(SLO_STATES)}.", param="slo")
    return text


async def search_requests(
    database: Database, traces: Database, search: RequestSearch, page: PageRequest
) -> LoggedRequestPage:
    """Return a page of requests, newest first."""
    async with database.read() as session:
        statement = search.statement(session.get_bind().dialect.name)
        records, next_cursor = await read_page(
            session, statement, page, UsageRecord.started_at, UsageRecord.request_id, newest_first=True
        )
    traced = await _traced(traces, [record.request_id for record in records])
    return LoggedRequestPage([_view(record, traced) for record in records], next_cursor)


async def read_request(database: Database, traces: Database, request_id: str) -> LoggedRequest:
    """Return one request, whatever its time. Raises NotFound."""
    async with database.read() as session:
        record = await _find(session, request_id)
    if record is None:
        raise NotFound(
            "The request log has no request with this id: it ended a moment ago, or retention has deleted its row.",
            code="request_not_found",
            param="request_id",
        )
    return _view(record, await _traced(traces, [request_id]))


async def _find(session: AsyncSession, request_id: str) -> UsageRecord | None:
    found = select(UsageRecord).where(UsageRecord.request_id == request_id, UsageRecord.endpoint != SPECULATIVE_PREFILL)
    return (await session.scalars(found)).one_or_none()


async def _traced(traces: Database, request_ids: Collection[str]) -> frozenset[str] | None:
    """Return the requests with a stored trace; None if the trace store does not answer, so the log is shown anyway."""
    if not request_ids:
        return frozenset()
    try:
        async with reading(traces) as session:
            found = select(TraceRecord.request_id).where(TraceRecord.request_id.in_(request_ids))
            return frozenset(await session.scalars(found))
    except Unavailable:
        return None


def _view(record: UsageRecord, traced: frozenset[str] | None) -> LoggedRequest:
    has_trace = None if traced is None else record.request_id in traced
    return copy_fields(record, LoggedRequest, tags=tags_of(record.tags), has_trace=has_trace)
