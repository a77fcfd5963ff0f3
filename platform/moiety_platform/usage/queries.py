"""Reads usage: sums over groups, and single requests. All arithmetic is the database's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import BigInteger, ColumnElement, Double, Select, case, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.paging import PageRequest, Position, after_position, cut_page
from moiety_platform.errors import BadRequest
from moiety_platform.tenants.checks import check_moment
from moiety_platform.tenants.models import ApiKey, Project, Tenant
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.schemas import RequestPage, RequestView, UsageGroup, UsageReport, UsageTotals

MAX_GROUPS = 1000
DEFAULT_SPAN = timedelta(hours=24)
GROUPINGS = ("tenant", "project", "key", "model", "service_class", "hour")

_COLUMNS: dict[str, Any] = {
    "tenant": UsageRecord.tenant_id,
    "project": UsageRecord.project_id,
    "key": UsageRecord.key_id,
    "model": UsageRecord.model,
    "service_class": UsageRecord.service_class,
}
_NAMED: dict[str, Any] = {"tenant": Tenant, "project": Project, "key": ApiKey}


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Which requests count: those started in [since, until), with these properties where given."""

    since: datetime
    until: datetime
    tenant_id: str | None = None
    project_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    outcome: str | None = None

    def conditions(self) -> list[ColumnElement[bool]]:
        """As SQL."""
        wanted: list[ColumnElement[bool]] = [
            UsageRecord.started_at >= self.since,
            UsageRecord.started_at < self.until,
        ]
        for name in ("tenant_id", "project_id", "key_id", "model", "outcome"):
            value = getattr(self, name)
            if value is not None:
                wanted.append(getattr(UsageRecord, name) == value)
        return wanted


def parse_grouping(text: str | None) -> tuple[str, ...]:
    """`tenant,hour` as names of groupings; nothing for None. Raises BadRequest."""
    if not text:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(GROUPINGS):
        raise BadRequest(
            f"'group_by' must be one or more of {', '.join(GROUPINGS)}, separated by commas, each once.",
            param="group_by",
        )
    return names


def parse_filter(now: datetime, since: datetime | None, until: datetime | None, **equal: str | None) -> UsageFilter:
    """A filter from what a client gave; the last 24 hours if no time is given. Raises BadRequest."""
    since = None if since is None else check_moment(since, "since")
    until = None if until is None else check_moment(until, "until")
    for name, value in equal.items():
        if value is not None and not (value.isprintable() and len(value) <= 256):
            raise BadRequest(f"'{name}' must have at most 256 printable characters.", param=name)
    end = until or now + timedelta(seconds=1)
    try:
        start = since or end - DEFAULT_SPAN
    except OverflowError as exc:
        raise BadRequest("'until' lies too far in the past.", param="until") from exc
    if start >= end:
        raise BadRequest("'since' must lie before 'until'.", param="since")
    return UsageFilter(since=start, until=end, **equal)


async def sum_usage(session: AsyncSession, wanted: UsageFilter, grouping: Sequence[str]) -> UsageReport:
    """Sums a group, the groups with most output first; by time, if grouped by the hour."""
    keys = [_hour(session.get_bind().dialect.name) if name == "hour" else _COLUMNS[name] for name in grouping]
    statement = select(*keys, *_sums()).where(*wanted.conditions())
    if keys:
        order = [keys[grouping.index("hour")]] if "hour" in grouping else []
        output = func.sum(UsageRecord.output_tokens).desc()
        statement = statement.group_by(*keys).order_by(*order, output, *keys).limit(MAX_GROUPS + 1)
    rows = (await session.execute(statement)).all()
    names = await _names(session, grouping, rows[:MAX_GROUPS])
    groups = [
        UsageGroup(
            group={
                part: value
                for name, value in zip(grouping, row, strict=False)
                for part, value in names.label(name, value)
            },
            totals=_totals(row[len(keys) :]),
        )
        for row in rows[:MAX_GROUPS]
    ]
    return UsageReport(since=wanted.since, until=wanted.until, data=groups, truncated=len(rows) > MAX_GROUPS)


async def list_requests(session: AsyncSession, wanted: UsageFilter, page: PageRequest) -> RequestPage:
    """Single requests, newest first."""
    statement: Select[Any] = select(UsageRecord).where(*wanted.conditions())
    statement = after_position(statement, page, UsageRecord.started_at, UsageRecord.request_id, newest_first=True)
    found: Sequence[UsageRecord] = (await session.scalars(statement)).all()
    records, next_cursor = cut_page(found, page, lambda record: Position(record.started_at, record.request_id))
    return RequestPage([RequestView.of(record) for record in records], next_cursor)


@dataclass(frozen=True, slots=True)
class _Names:
    """What people call the ids in a report."""

    by_id: dict[str, str]

    def label(self, grouping: str, value: str) -> list[tuple[str, str | None]]:
        if grouping in _NAMED:
            return [(f"{grouping}_id", value), (f"{grouping}_name", self.by_id.get(value))]
        return [(grouping, value)]


async def _names(session: AsyncSession, grouping: Sequence[str], rows: Sequence[Any]) -> _Names:
    by_id: dict[str, str] = {}
    for index, name in enumerate(grouping):
        if name in _NAMED and rows:
            model = _NAMED[name]
            ids = {row[index] for row in rows}
            found = await session.execute(select(model.id, model.name).where(model.id.in_(ids)))
            by_id.update((row_id, row_name) for row_id, row_name in found)
    return _Names(by_id)


def _hour(dialect: str) -> ColumnElement[str]:
    """The hour in which a request started, UTC, as text: 2026-01-31T12:00:00Z."""
    started = UsageRecord.started_at
    if dialect == "postgresql":
        return func.to_char(func.timezone("UTC", started), 'YYYY-MM-DD"T"HH24:00:00"Z"')
    return func.strftime("%Y-%m-%dT%H:00:00Z", started)


def _sums() -> list[ColumnElement[Any]]:
    """The fields of UsageTotals, in their order."""

    def total(column: Any) -> ColumnElement[int]:
        return cast(func.coalesce(func.sum(column), 0), BigInteger)

    def count_of(outcome: str) -> ColumnElement[int]:
        return total(case((UsageRecord.outcome == outcome, 1), else_=0))

    kept = case((UsageRecord.sla_attained.is_(True), 1), (UsageRecord.sla_attained.is_(False), 0))  # else null
    return [
        func.count(),
        count_of("failed"),
        count_of("rejected"),
        count_of("disconnected"),
        total(UsageRecord.prompt_tokens),
        total(UsageRecord.cached_tokens),
        total(UsageRecord.output_tokens),
        func.avg(UsageRecord.ttft_ms),
        func.avg(UsageRecord.duration_ms),
        total(UsageRecord.num_preemptions),
        total(UsageRecord.cost_nanodollars),
        func.avg(cast(kept, Double)),
    ]


def _totals(row: Sequence[Any]) -> UsageTotals:
    return UsageTotals(**dict(zip(UsageTotals.__struct_fields__, row, strict=True)))
