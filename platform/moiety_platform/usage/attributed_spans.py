"""Spans of time whose sums by end user and tags are exact. Within the caller's transaction.

New rows cause no work for these sums. A span keeps a copy of the sums of its hours, and a reader uses it only if the
hours still have those sums. So a late row, also of a gateway that does not know the table, makes the reader read the
requests instead, until the retention job has summed them up again (`attributed_sums.py`).

A reader needs a stable snapshot. A writer reads the hours' sums before it sums up the requests: if a row comes in
between, the span's copy differs from the hours, and the span is not used.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import Select, Subquery, and_, func, or_, select, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.usage.days import DAY, Span, day_of
from moiety_platform.usage.models import AttributedSpan, UsageCut, UsageDay, UsageDayMark, UsageHour

HOUR = timedelta(hours=1)
_NAMES = {column.name for column in UsageHour.__table__.columns if not column.primary_key}
COUNTS = tuple(column.name for column in AttributedSpan.__table__.columns if column.name in _NAMES)
"""The counts of a span that must be those of its hours: all whole numbers but bytes."""

Counts = tuple[int, ...]

NEVER = -1  # a number of requests that no hour has


async def split_time(
    session: AsyncSession, since: datetime, until: datetime, tenant_id: str | None
) -> tuple[list[Span], list[Span]]:
    """Return the spans in [since, until) whose requests are summed up, and those whose requests must be read.

    Without a tenant, only days that are summed up for all tenants are in the first list.
    """
    first = day_of(since) if day_of(since) == since else day_of(since) + DAY
    cut = await last_cut_day(session)
    if cut is not None:
        first = max(first, cut + DAY)
    days = [first + number * DAY for number in range(max(0, -((first - until) // DAY)))]
    whole = [day for day in days if day + DAY <= until]
    exact = await _exact_days(session, whole, tenant_id) if whole else set()
    found = [(day, day + DAY) for day in exact]
    if tenant_id is not None:
        found += [
            (span.start, span.until)
            for span in await exact_spans(session, tenant_id, [day for day in days if day not in exact])
            if span.until <= until
        ]
    covered = _joined(found)
    ends = [since, *(moment for span in covered for moment in span), until]
    return covered, [(start, end) for start, end in zip(ends[::2], ends[1::2], strict=True) if start < end]


async def last_cut_day(session: AsyncSession) -> datetime | None:
    """Return the last day of which requests are deleted: sums by end user contain only requests that are kept."""
    hour = await session.scalar(select(func.max(UsageCut.hour)))
    return None if hour is None else day_of(hour)


async def exact_spans(session: AsyncSession, tenant_id: str, days: Collection[datetime]) -> list[AttributedSpan]:
    """Return the tenant's spans within these days that still have the sums of their hours, in order."""
    if not days:
        return []
    of_tenant = select(AttributedSpan).where(AttributedSpan.tenant_id == tenant_id, AttributedSpan.day.in_(days))
    spans = (await session.scalars(of_tenant.order_by(AttributedSpan.start))).all()
    hours = await hourly_counts(session, tenant_id, sorted({span.day for span in spans}))
    return [span for span in spans if counts_of(span) == added(hours.get(hour) for hour in hours_of(span))]


async def hourly_counts(session: AsyncSession, tenant_id: str, days: Iterable[datetime]) -> dict[datetime, Counts]:
    """Return the tenant's sums of the hours of these days, without hours that have none."""
    hours = [day + number * HOUR for day in days for number in range(24)]
    sums = [func.sum(getattr(UsageHour, name)) for name in COUNTS]
    of_hours = UsageHour.hour.in_(hours), UsageHour.tenant_id == tenant_id
    rows = await session.execute(select(UsageHour.hour, *sums).where(*of_hours).group_by(UsageHour.hour))
    return {hour: tuple(map(int, counts)) for hour, *counts in rows}


def stale_tenants(days: Sequence[datetime], tenant_id: str | None = None) -> Select[Any]:
    """Select days, tenants and their counts where the sums by end user are not those of the day.

    For days whose hours are summed up.
    """
    made = _summed(AttributedSpan, days, tenant_id)
    of_day = _summed(UsageDay, days, tenant_id)
    differs = or_(made.c.tenant_id.is_(None), *(made.c[name] != of_day.c[name] for name in COUNTS))
    same = and_(made.c.tenant_id == of_day.c.tenant_id, made.c.day == of_day.c.day)
    return select(of_day).outerjoin(made, same).where(differs)


def _summed(table: type[AttributedSpan | UsageDay], days: Sequence[datetime], tenant_id: str | None) -> Subquery:
    sums = [func.sum(getattr(table, name)).label(name) for name in COUNTS]
    wanted = select(table.day, table.tenant_id, *sums).where(table.day.in_(days))
    if tenant_id is not None:
        wanted = wanted.where(table.tenant_id == tenant_id)
    return wanted.group_by(table.day, table.tenant_id).subquery()


async def _exact_days(session: AsyncSession, days: Sequence[datetime], tenant_id: str | None) -> set[datetime]:
    done = select(UsageDayMark.day).where(UsageDayMark.is_done, UsageDayMark.day.in_(days))
    listed = sorted(await session.scalars(done))
    if not listed:
        return set()
    stale = stale_tenants(listed, tenant_id).subquery()
    return set(listed) - set(await session.scalars(select(stale.c.day).distinct()))


async def invalidate_span(session: AsyncSession, tenant_id: str, started_at: datetime) -> None:
    """Make a request's span inexact, because the request is about to change, perhaps without a change of any count."""
    within = AttributedSpan.start <= started_at, AttributedSpan.until > started_at
    changed = update(AttributedSpan).where(AttributedSpan.tenant_id == tenant_id, *within)
    await session.execute(changed.values(requests=NEVER))


def counts_of(span: AttributedSpan) -> Counts:
    """Return the counts of the span's hours when it was made."""
    return tuple(getattr(span, name) for name in COUNTS)


def hours_of(span: AttributedSpan) -> list[datetime]:
    """Return the hours of the span."""
    return [span.start + number * HOUR for number in range((span.until - span.start) // HOUR)]


def added(counts: Iterable[Counts | None]) -> Counts:
    """Return the sums of the counts; zeros for none."""
    return tuple(map(sum, zip((0,) * len(COUNTS), *(one for one in counts if one is not None), strict=True)))


def _joined(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, adjacent ones as one."""
    found: list[Span] = []
    for start, until in sorted(spans):
        if found and found[-1][1] == start:
            found[-1] = found[-1][0], until
        else:
            found.append((start, until))
    return found
