"""Sums per minute of the last hours, by tenant and class: stored, read and deleted within the caller's transaction.

They are for display; billing uses the ledger.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Double, cast, delete, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import in_rows
from moiety_platform.errors import BadRequest
from moiety_platform.usage.group_names import find_names
from moiety_platform.usage.models import UsageMinute
from moiety_platform.usage.queries import UsageFilter
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.schemas import RequestSums
from moiety_platform.usage.sums import UsageSums

KEPT_HOURS = 6
ROWS_AT_ONCE = 500
MAX_STEP = 60
MAX_SUMS = 2000
GROUPINGS = ("tenant", "service_class")

_COLUMNS = {"tenant": "tenant_id", "service_class": "service_class"}
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MINUTE = timedelta(minutes=1)


class MinuteTotals(RequestSums, frozen=True):
    """Sums over the requests that ended in a time span; means are null where no request has the figure.

    `good_tokens` are the output tokens of requests that attained their SLO; divided by the time they are goodput.
    """

    good_tokens: int
    mean_ttft_ms: float | None
    mean_queue_ms: float | None
    mean_duration_ms: float | None
    preemptions: int
    num_slo_attained: int  # requests that attained their SLO
    num_slo_requests: int


class UsageMinuteSum(msgspec.Struct, frozen=True):
    """Sums of one group over one step of the report, which starts at `at`."""

    at: datetime
    group: dict[str, str | None]
    totals: MinuteTotals


class MinuteReport(msgspec.Struct, frozen=True):
    """Sums by time, oldest first; times and groups without requests are omitted.

    `truncated` says that there are more than are listed.
    """

    since: datetime
    until: datetime
    step_minutes: int
    data: list[UsageMinuteSum]
    truncated: bool


def _minute_of(row: UsageRow) -> tuple[int, str, str]:
    ended_s = row.started_at.timestamp() + row.duration_ms / 1000
    return int(ended_s // 60), row.tenant_id, row.service_class


MINUTES = UsageSums(UsageMinute, _minute_of)  # a request counts in the minute in which it ended


def parse_groups(text: str | None) -> tuple[str, ...]:
    """Parse `tenant,service_class` into names of groupings; empty for None. Raises BadRequest."""
    names = tuple(part.strip() for part in text.split(",")) if text else ()
    if len(set(names)) != len(names) or not set(names) <= set(GROUPINGS):
        raise BadRequest(
            f"'group_by' must be one or both of {', '.join(GROUPINGS)}, separated by commas, each once, not "
            f"{(text or '')[:64]!r}.",
            param="group_by",
        )
    return names


async def sum_minutes(
    session: AsyncSession, usage_filter: UsageFilter, grouping: Sequence[str], step: int
) -> MinuteReport:
    """Return sums over steps of `step` minutes, by group. Deleted minutes are missing."""
    table, first, last = UsageMinute, _minute(usage_filter.since), _minute(usage_filter.until)
    slot = ((table.minute - first) // step).label("slot")
    keys: list[Any] = [getattr(table, _COLUMNS[name]) for name in grouping]
    in_time = table.minute >= first, table.minute <= last
    statement = select(slot, *keys, *_totals()).where(*in_time, *usage_filter.conditions(table))
    statement = statement.group_by(slot, *keys).order_by(slot, *keys).limit(MAX_SUMS + 1)
    rows = (await session.execute(statement)).all()
    names = await find_names(session, grouping, [row[1:] for row in rows[:MAX_SUMS]])
    sums = [
        UsageMinuteSum(
            at=_EPOCH + (first + row[0] * step) * _MINUTE,
            group=names.label_all(grouping, row[1:]),
            totals=MinuteTotals(*row[1 + len(keys) :]),
        )
        for row in rows[:MAX_SUMS]
    ]
    return MinuteReport(_EPOCH + first * _MINUTE, usage_filter.until, step, sums, truncated=len(rows) > MAX_SUMS)


async def purge_minutes(session: AsyncSession, before: datetime) -> int:
    """Delete some sums of minutes before `before`; return their number."""
    keys = [getattr(UsageMinute, name) for name in MINUTES.keys]
    old = select(*keys).where(UsageMinute.minute < _minute(before)).order_by(*keys).limit(ROWS_AT_ONCE)
    found = [tuple(row) for row in await session.execute(old.with_for_update(skip_locked=True))]
    if found:
        await session.execute(delete(UsageMinute).where(in_rows(session, keys, found)))
    return len(found)


def _minute(moment: datetime) -> int:
    return (moment - _EPOCH) // _MINUTE


def _totals() -> list[ColumnElement[Any]]:
    """Return the columns for the fields of MinuteTotals, in their order."""
    of = UsageMinute

    def mean(column: Any, count: Any) -> ColumnElement[Any]:
        return cast(cast(func.sum(column), Double) / func.nullif(func.sum(count), 0), Double).label(
            f"mean_{column.key}"
        )

    means = {
        "mean_ttft_ms": mean(of.ttft_ms, of.num_ttft),
        "mean_queue_ms": mean(of.queue_ms, of.num_queue),
        "mean_duration_ms": mean(of.duration_ms, of.requests),
    }
    return [
        means[name] if name in means else cast(func.sum(getattr(of, name)), BigInteger).label(name)
        for name in MinuteTotals.__struct_fields__
    ]
