"""Queries of usage: sums over groups, and single requests. The database does all arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    ColumnElement,
    Double,
    Select,
    Subquery,
    and_,
    case,
    cast,
    func,
    literal_column,
    select,
    type_coerce,
    union_all,
)
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import InstrumentedAttribute
from sqlalchemy.types import TypeEngine

from moiety_platform.db.base import WideInteger
from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.errors import BadRequest
from moiety_platform.usage.attributed_spans import split_time
from moiety_platform.usage.attribution import is_tag_name
from moiety_platform.usage.days import Span, longest_done
from moiety_platform.usage.group_names import find_names
from moiety_platform.usage.models import (
    IS_ATTRIBUTED,
    AttributedSum,
    UsageDay,
    UsageHour,
    UsageMinute,
    UsageRecord,
)
from moiety_platform.usage.schemas import RequestPage, RequestView, UsageGroup, UsageReport, UsageTotals
from moiety_platform.usage.wide_sums import high_part, join_parts, low_part
from moiety_wire.classes import SPECULATIVE_PREFILL

MAX_GROUPS = 1000
GROUPINGS = ("tenant", "project", "key", "model", "service_class", "hour", "day", "end_user")
_TIMES = ("hour", "day")
TAG_PREFIX = "tag:"  # of the grouping by one tag's values, such as tag:team
MAX_ATTRIBUTED_SPAN = timedelta(days=31)  # of reports by end user or tag, which may read many requests

_COLUMNS = {"tenant": "tenant_id", "project": "project_id", "key": "key_id"}
_KEYS = ("tenant_id", "project_id", "key_id", "model", "service_class")
_BYTES = ("expert_read_bytes", "expert_moved_bytes")
_NARROW = (
    *("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("ttft_ms", "num_ttft", "duration_ms", "preemptions", "cost_nanodollars", "num_slo_attained", "num_slo_requests"),
    *("speculative_tokens", "speculative_used_tokens", "credit_nanodollars", "num_guarantees", "num_guarantees_met"),
)
AMOUNTS = (*_NARROW, *_BYTES, *(f"{name}_high" for name in _BYTES))
"""The columns of `request_amounts` that are added up, in their order, in which the parts of a union have them."""
_HOUR = timedelta(hours=1)


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """Filter of requests: those started in [since, until), with these properties where given."""

    since: datetime
    until: datetime
    tenant_id: str | None = None
    project_id: str | None = None
    key_id: str | None = None
    model: str | None = None
    outcome: str | None = None
    service_class: str | None = None
    end_user: str | None = None
    tag: tuple[str, str] | None = None  # name and value
    among: tuple[str, tuple[str, ...]] | None = None  # a column of ids, and the ids of it

    def conditions(
        self, table: type[UsageRecord | UsageHour | UsageDay | UsageMinute | AttributedSum] = UsageRecord
    ) -> list[ColumnElement[bool]]:
        """Return the filter as SQL conditions, without the time and the tag."""
        names = ("tenant_id", "project_id", "key_id", "model", "outcome", "service_class", "end_user")
        given = {name: getattr(self, name) for name in names}
        found = [getattr(table, name) == value for name, value in given.items() if value is not None]
        if self.among is not None:
            name, ids = self.among
            found.append(getattr(table, name).in_(ids))
        return found

    def row_conditions(self, dialect: str) -> list[ColumnElement[bool]]:
        """Return the filter of single requests as SQL conditions, without the time."""
        found = self.conditions()
        if self.tag is not None:
            name, value = self.tag
            found.append(_tag(dialect, name) == value)
        # without a type, with which SQLAlchemy would compare it with 1, and SQLite could not use the index
        return [*found, literal_column(f"({IS_ATTRIBUTED})")] if self.is_attributed else found

    @property
    def is_attributed(self) -> bool:
        """True if the filter is for an end user or a tag."""
        return self.end_user is not None or self.tag is not None

    @property
    def whole_hours(self) -> tuple[datetime, datetime]:
        """Start and end of the whole hours in the time span; the end is not after the start if there are none."""
        first, last = _floor(self.since), _floor(self.until)
        return (first if first == self.since else first + _HOUR), last


def parse_grouping(text: str | None) -> tuple[str, ...]:
    """Parse `tenant,hour` into names of groupings; empty for None. Raises BadRequest."""
    if not text:
        return ()
    names = tuple(part.strip() for part in text.split(","))
    if len(set(names)) != len(names) or not all(map(_is_grouping, names)):
        raise BadRequest(
            f"'group_by' must be one or more of {', '.join(GROUPINGS)} and {TAG_PREFIX}NAME, separated by commas, each "
            f"once, not {text[:64]!r}.",
            param="group_by",
        )
    return names


def _is_grouping(name: str) -> bool:
    return name in GROUPINGS or (name.startswith(TAG_PREFIX) and is_tag_name(name.removeprefix(TAG_PREFIX)))


async def sum_usage(session: AsyncSession, usage_filter: UsageFilter, grouping: Sequence[str]) -> UsageReport:
    """Return sums per group, the groups with most output tokens first; by time if grouped by the hour or the day.

    Whole days and hours come from their sums, so that a long time costs no more than its days; the rest is added up.
    The present hour is whole for a time that ends after the last request. Reports by end user or tag have sums of their
    own (`attributed_spans.py`), read the requests where these are missing, and contain only requests whose rows are
    kept. They raise BadRequest for a time of more than MAX_ATTRIBUTED_SPAN. Call it in a transaction with a stable
    snapshot (`take_snapshot_locks`): it reads which days have sums before it reads these.
    """
    source = await source_of(session, usage_filter, grouping)
    keys = group_keys(source, grouping)
    statement = select(*keys, *_sums(source))
    if keys:
        output = func.sum(source.c.output_tokens)
        statement = statement.group_by(*keys).order_by(*group_order(keys, grouping, output)).limit(MAX_GROUPS + 1)
        counted = func.sum(source.c.requests + source.c.speculative_tokens)
        # a correction may have moved the requests of an hour to another class
        statement = statement.having(counted > 0)
    rows = (await session.execute(statement)).all()
    names = await find_names(session, grouping, rows[:MAX_GROUPS])
    groups = [
        UsageGroup(group=names.label_all(grouping, row), totals=_totals(row[len(keys) :])) for row in rows[:MAX_GROUPS]
    ]
    return UsageReport(
        since=usage_filter.since, until=usage_filter.until, data=groups, truncated=len(rows) > MAX_GROUPS
    )


def is_by_attribution(grouping: Sequence[str]) -> bool:
    """Return whether a report groups by end user or tag."""
    return any(name == "end_user" or name.startswith(TAG_PREFIX) for name in grouping)


def group_keys(source: Subquery, grouping: Sequence[str]) -> list[ColumnElement[Any]]:
    """Return the columns of the groupings."""
    return [source.c[_COLUMNS.get(name, name)] for name in grouping]


def group_order(
    keys: Sequence[ColumnElement[Any]], grouping: Sequence[str], output_tokens: ColumnElement[Any]
) -> list[ColumnElement[Any]]:
    """Return the order of a report's groups: by time, then those with most output tokens first."""
    times = [key for key, name in zip(keys, grouping, strict=True) if name in _TIMES]
    return [*times, output_tokens.desc(), *keys]


async def source_of(
    session: AsyncSession, usage_filter: UsageFilter, grouping: Sequence[str], sums: Sequence[str] = ()
) -> Subquery:
    """Return the rows that a report adds up, with a column for each grouping and for each of the sums, or for all.

    A database computes every sum of these rows, also those that are not read. Raises BadRequest as `sum_usage` does,
    and needs a stable snapshot as well.
    """
    columns, dialect = [_COLUMNS.get(name, name) for name in grouping], session.get_bind().dialect.name
    if reads_requests(usage_filter, grouping):
        _check_span(usage_filter)
        return await _attributed_source(session, usage_filter, columns, sums)
    usage_filter = await _to_whole_hour(session, usage_filter)
    days = None if "hour" in grouping else await longest_done(session, *usage_filter.whole_hours)
    return _source(dialect, usage_filter, columns, days, sums)


async def _attributed_source(
    session: AsyncSession, usage_filter: UsageFilter, columns: Sequence[str], sums: Sequence[str]
) -> Subquery:
    """Return the rows of a report by end user or tag: sums where they are exact, single requests in the other time."""
    dialect, row, covered = session.get_bind().dialect.name, UsageRecord, list[Span]()
    rest = [(usage_filter.since, usage_filter.until)]
    if "hour" not in columns:
        covered, rest = await split_time(session, *rest[0], usage_filter.tenant_id)
    parts = [_attributed(dialect, usage_filter, span, columns) for span in covered]
    for start, end in rest:
        in_time = and_(row.started_at >= start, row.started_at < end)
        parts.append(request_amounts(dialect, usage_filter, in_time, columns))
    if len(parts) == 1:
        return parts[0].subquery()
    if usage_filter.tenant_id is None:  # one tenant may have nearly as many groups as requests: then once is faster
        parts = [_added_up(part, columns, sums) for part in parts]
    return union_all(*parts).subquery()


async def _to_whole_hour(session: AsyncSession, usage_filter: UsageFilter) -> UsageFilter:
    """Return the filter with the end of the hour as its end, if no request started after its end.

    So a report up to now reads the sums of the present hour, and not its requests.
    """
    end = _floor(usage_filter.until)
    if end == usage_filter.until:
        return usage_filter
    later = select(UsageRecord.request_id).where(UsageRecord.started_at >= usage_filter.until).limit(1)
    return usage_filter if await session.scalar(later) else replace(usage_filter, until=end + _HOUR)


def reads_requests(usage_filter: UsageFilter, grouping: Sequence[str]) -> bool:
    """Return whether a report reads requests, or sums of them by end user and tags: other sums know neither."""
    return usage_filter.is_attributed or is_by_attribution(grouping)


async def list_requests(session: AsyncSession, usage_filter: UsageFilter, page: PageRequest) -> RequestPage:
    """Return a page of single requests, newest first."""
    in_time = UsageRecord.started_at >= usage_filter.since, UsageRecord.started_at < usage_filter.until
    is_request = UsageRecord.endpoint != SPECULATIVE_PREFILL
    conditions = usage_filter.row_conditions(session.get_bind().dialect.name)
    statement = select(UsageRecord).where(*in_time, is_request, *conditions)
    records, next_cursor = await read_page(
        session, statement, page, UsageRecord.started_at, UsageRecord.request_id, newest_first=True
    )
    return RequestPage([RequestView.of(record) for record in records], next_cursor)


def _floor(moment: datetime) -> datetime:
    return moment.astimezone(UTC).replace(minute=0, second=0, microsecond=0)


def _source(
    dialect: str, usage_filter: UsageFilter, keys: Sequence[str], days: Span | None, sums: Sequence[str]
) -> Subquery:
    """Return the rows to add up.

    These are the sums of the days and of the whole hours around them, and single requests at both ends.
    """
    start, end = usage_filter.whole_hours
    started = UsageRecord.started_at
    if start >= end:
        return request_amounts(
            dialect, usage_filter, and_(started >= usage_filter.since, started < usage_filter.until)
        ).subquery()
    before, after = (
        and_(started >= usage_filter.since, started < start),
        and_(started >= end, started < usage_filter.until),
    )
    parts = [request_amounts(dialect, usage_filter, before), request_amounts(dialect, usage_filter, after)]
    if days is None:
        parts.append(_summed(dialect, usage_filter, UsageHour.hour, start, end))
    else:
        parts.append(_summed(dialect, usage_filter, UsageHour.hour, start, days[0]))
        parts.append(_summed(dialect, usage_filter, UsageDay.day, *days))
        parts.append(_summed(dialect, usage_filter, UsageHour.hour, days[1], end))
    return union_all(*(_added_up(part, keys, sums) for part in parts)).subquery()


def _added_up(part: Select[Any], keys: Sequence[str], sums: Sequence[str]) -> Select[Any]:
    """Return the part's sums by these keys, so that only one row per group goes through the union."""
    subquery = part.subquery().c
    added = [func.sum(subquery[name]).label(name) for name in sums or AMOUNTS]
    return select(*(subquery[name] for name in keys), *added).group_by(*(subquery[name] for name in keys))


def _check_span(usage_filter: UsageFilter) -> None:
    if usage_filter.until - usage_filter.since > MAX_ATTRIBUTED_SPAN + timedelta(minutes=1):
        raise BadRequest(
            f"A report by end user or tag may span {MAX_ATTRIBUTED_SPAN.days} days; ask for a shorter time, or for "
            "several.",
            param="since",
        )


def _tag(dialect: str, name: str, table: type[UsageRecord | AttributedSum] = UsageRecord) -> ColumnElement[str]:
    """Return the value of a request's tag, NULL if it has none."""
    tags = cast(table.tags, JSON) if dialect == "postgresql" else type_coerce(table.tags, JSON)
    value: ColumnElement[str] = tags[name].as_string()
    return value


def _attribution(
    dialect: str, table: type[UsageRecord | AttributedSum], columns: Sequence[str]
) -> list[ColumnElement[Any]]:
    """Return those of the columns that are an end user or tags; `tags` are all of them, as they are stored."""
    names = (name for name in columns if name.startswith(TAG_PREFIX))
    values = [_tag(dialect, name.removeprefix(TAG_PREFIX), table).label(name) for name in names]
    return [*values, *(getattr(table, name).label(name) for name in ("end_user", "tags") if name in columns)]


def request_amounts(
    dialect: str, usage_filter: UsageFilter, in_time: ColumnElement[bool], columns: Sequence[str] = ()
) -> Select[Any]:
    """Select requests in the form in which they are added to hours, with further columns of single requests."""
    row = UsageRecord

    def when(condition: ColumnElement[bool]) -> ColumnElement[int]:
        return case((condition, 1), else_=0)

    return select(
        _hour(dialect, row.started_at).label("hour"),
        _day(dialect, row.started_at).label("day"),
        *(getattr(row, name).label(name) for name in _KEYS),
        when(row.endpoint != SPECULATIVE_PREFILL).label("requests"),
        *(when(row.outcome == outcome).label(outcome) for outcome in ("failed", "rejected", "disconnected")),
        row.prompt_tokens.label("prompt_tokens"),
        row.cached_tokens.label("cached_tokens"),
        row.output_tokens.label("output_tokens"),
        func.coalesce(row.ttft_ms, 0.0).label("ttft_ms"),
        when(row.ttft_ms.is_not(None)).label("num_ttft"),
        row.duration_ms.label("duration_ms"),
        row.num_preemptions.label("preemptions"),
        row.cost_nanodollars.label("cost_nanodollars"),
        when(row.slo_attained.is_(True)).label("num_slo_attained"),
        when(row.slo_attained.is_not(None)).label("num_slo_requests"),
        row.speculative_tokens.label("speculative_tokens"),
        row.speculative_used_tokens.label("speculative_used_tokens"),
        row.credit_nanodollars.label("credit_nanodollars"),
        when(row.guarantee_met.is_not(None)).label("num_guarantees"),
        when(row.guarantee_met.is_(True)).label("num_guarantees_met"),
        *_parts_of_bytes(dialect, row),
        *_attribution(dialect, row, columns),
    ).where(in_time, *usage_filter.row_conditions(dialect))


def _summed(
    dialect: str, usage_filter: UsageFilter, moment: InstrumentedAttribute[datetime], start: datetime, end: datetime
) -> Select[Any]:
    """Select sums of hours or days, with the same columns; the hour of a day's sums is meaningless."""
    table: Any = moment.class_
    sums = [*(getattr(table, name) for name in _NARROW), *_parts_of_bytes(dialect, table)]
    keys = [getattr(table, name) for name in _KEYS]
    in_time = moment >= start, moment < end
    times = _hour(dialect, moment).label("hour"), _day(dialect, moment).label("day")
    return select(*times, *keys, *sums).where(*in_time, *usage_filter.conditions(table))


def _attributed(dialect: str, usage_filter: UsageFilter, span: Span, columns: Sequence[str]) -> Select[Any]:
    """Select sums by end user and tags, with the columns of requests; their hour is meaningless."""
    table = AttributedSum
    times = _hour(dialect, table.start).label("hour"), _day(dialect, table.start).label("day")
    keys = [getattr(table, name) for name in _KEYS]
    sums = [getattr(table, name) for name in AMOUNTS]
    of_tag = [] if usage_filter.tag is None else [_tag(dialect, usage_filter.tag[0], table) == usage_filter.tag[1]]
    return select(*times, *keys, *sums, *_attribution(dialect, table, columns)).where(
        table.start >= span[0], table.start < span[1], *usage_filter.conditions(table), *of_tag
    )


def _parts_of_bytes(dialect: str, table: Any) -> list[ColumnElement[int]]:
    """Return the columns of expert bytes in two parts each, whose sums fit into 64 bits on SQLite."""
    low = [low_part(dialect, getattr(table, name)).label(name) for name in _BYTES]
    return [*low, *(high_part(dialect, getattr(table, name)).label(f"{name}_high") for name in _BYTES)]


def _hour(dialect: str, moment: Any) -> ColumnElement[str]:
    """Return the hour of a time, in UTC, as text: 2026-01-31T12:00:00Z."""
    if dialect == "postgresql":
        return func.to_char(func.timezone("UTC", moment), 'YYYY-MM-DD"T"HH24:00:00"Z"')
    return func.strftime("%Y-%m-%dT%H:00:00Z", moment)


def _day(dialect: str, moment: Any) -> ColumnElement[str]:
    """Return the day of a time, in UTC, as text: 2026-01-31."""
    if dialect == "postgresql":
        return func.to_char(func.timezone("UTC", moment), "YYYY-MM-DD")
    return func.strftime("%Y-%m-%d", moment)


def _sums(source: Subquery) -> list[ColumnElement[Any]]:
    """Return the columns for the fields of UsageTotals, in their order, and the high parts of the bytes."""
    columns = source.c

    def total(column: ColumnElement[Any], kind: TypeEngine[int] | None = None) -> ColumnElement[int]:
        return cast(func.coalesce(func.sum(column), 0), kind or BigInteger())

    def mean(column: ColumnElement[Any], count: ColumnElement[Any]) -> ColumnElement[float]:
        return cast(cast(func.sum(column), Double) / func.nullif(func.sum(count), 0), Double)

    return [
        total(columns.requests),
        total(columns.failed),
        total(columns.rejected),
        total(columns.disconnected),
        total(columns.prompt_tokens),
        total(columns.cached_tokens),
        total(columns.output_tokens),
        mean(columns.ttft_ms, columns.num_ttft),
        mean(columns.duration_ms, columns.requests),
        total(columns.preemptions),
        total(columns.cost_nanodollars),
        mean(columns.num_slo_attained, columns.num_slo_requests),
        total(columns.speculative_tokens),
        total(columns.speculative_used_tokens),
        total(columns.credit_nanodollars),
        total(columns.num_guarantees),
        total(columns.num_guarantees_met),
        *(total(columns[name], WideInteger()) for name in _BYTES),
        *(total(columns[f"{name}_high"]) for name in _BYTES),
    ]


def _totals(row: Sequence[Any]) -> UsageTotals:
    *amounts, read_high, moved_high = row
    values = dict(zip(UsageTotals.__struct_fields__, amounts, strict=True))
    for name, high in zip(_BYTES, (read_high, moved_high), strict=True):
        values[name] = join_parts(high, values[name])
    return UsageTotals(**values)
