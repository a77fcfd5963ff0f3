"""Sums by end user and tags, made from single requests some time after them. Within the caller's transaction.

The retention job makes them in parts of some thousand requests: for a past day, of all tenants; for the hours of a day
that is not over, of tenants with many requests. It runs in one gateway at a time (`retention/leases.py`).

A tenant whose clients name a new end user with each request has as many sums as requests, and no more. Its reports cost
what they would cost without the sums, and those of other tenants read none of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from itertools import accumulate, takewhile
from typing import Any

from sqlalchemy import CursorResult, and_, delete, func, insert, literal, or_, select, tuple_, update
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.tenants.models import TenantDeletion
from moiety_platform.usage.attributed_spans import (
    COUNTS,
    HOUR,
    Counts,
    added,
    exact_spans,
    hourly_counts,
    hours_of,
    last_cut_day,
    stale_tenants,
)
from moiety_platform.usage.days import DAY, Span, day_of
from moiety_platform.usage.models import AttributedSpan, AttributedSum, UsageDayMark, UsageHour, UsageRecord
from moiety_platform.usage.queries import AMOUNTS, UsageFilter, request_amounts

TENANTS_AT_ONCE = 500  # of a day
ROWS_AT_ONCE = 5000  # deleted, blanked
HOUR_DONE_AFTER = timedelta(minutes=10)  # most of an hour's requests have ended by then

_REQUESTS = COUNTS.index("requests")
_KEYS = ("project_id", "key_id", "model", "service_class", "end_user", "tags")
_PLACE = (AttributedSum.tenant_id, AttributedSum.start, AttributedSum.number)


@dataclass(frozen=True, slots=True)
class PartSizes:
    """Numbers of requests that are summed up at once, and that are worth it on a day that is not over."""

    at_once: int = 10_000  # more only for one hour of one tenant
    at_least: int = 2000  # of a tenant: fewer are read as quickly


DEFAULT_SIZES = PartSizes()


async def sum_up_attributed(session: AsyncSession, now: datetime, sizes: PartSizes = DEFAULT_SIZES) -> int:
    """Do one part of the work; return the number of changed spans, rows or days, 0 if nothing was left to do."""
    return (
        await _blank_deleted(session, now)
        or await _delete_cut(session)
        or await _sum_up_hours(session, now, sizes)
        or await _sum_up_day(session, sizes)
    )


async def blank_sums(session: AsyncSession, tenant_ids: Sequence[str]) -> int:
    """Remove the end users and tags of some of the tenants' sums; return their number. Amounts stay."""
    attributed = or_(AttributedSum.end_user.is_not(None), AttributedSum.tags.is_not(None))
    some = select(*_PLACE).where(AttributedSum.tenant_id.in_(tenant_ids), attributed).limit(ROWS_AT_ONCE)
    blank = update(AttributedSum).where(tuple_(*_PLACE).in_(some)).values(end_user=None, tags=None)
    return await _change(session, blank)


async def _blank_deleted(session: AsyncSession, now: datetime) -> int:
    """Blank sums that were made while a tenant's data was being deleted, or by a gateway that does not know them."""
    recent = or_(TenantDeletion.ended_at.is_(None), TenantDeletion.ended_at > now - DAY)
    tenant_ids = (await session.scalars(select(TenantDeletion.tenant_id).where(recent))).all()
    return await blank_sums(session, tenant_ids) if tenant_ids else 0


async def _delete_cut(session: AsyncSession) -> int:
    """Delete some sums of days of which requests are deleted: they would name end users of requests that are gone."""
    cut = await last_cut_day(session)
    if cut is None:
        return 0
    some = select(*_PLACE).where(AttributedSum.start < cut + DAY).limit(ROWS_AT_ONCE)
    deleted = await _change(session, delete(AttributedSum).where(tuple_(*_PLACE).in_(some)))
    return deleted or await _change(session, delete(AttributedSpan).where(AttributedSpan.day <= cut))


async def _sum_up_day(session: AsyncSession, sizes: PartSizes) -> int:
    """Sum up some tenants of the newest day that is over and has tenants without sums."""
    cut = await last_cut_day(session)
    kept = [] if cut is None else [UsageDayMark.day > cut]
    undone = select(UsageDayMark.day).where(UsageDayMark.is_done, ~UsageDayMark.is_attributed, *kept)
    day = await session.scalar(undone.order_by(UsageDayMark.day.desc()).limit(1))
    if day is None:
        return 0
    counts = {tenant_id: tuple(map(int, of)) for _, tenant_id, *of in await session.execute(stale_tenants([day]))}
    listed = sorted(counts, key=lambda tenant_id: (counts[tenant_id][_REQUESTS], tenant_id))[:TENANTS_AT_ONCE]
    num_requests = accumulate(counts[tenant_id][_REQUESTS] for tenant_id in listed)
    num_small = sum(1 for _ in takewhile(lambda total: total <= sizes.at_once, num_requests))
    if num_small:
        await _sum_up(session, (day, day + DAY), {one: counts[one] for one in listed[:num_small]})
        return num_small
    for tenant_id in listed:  # of which each has many
        if changed := await _extend(session, tenant_id, (day, day + DAY), replace(sizes, at_least=1)):
            return changed
    mark = update(UsageDayMark).where(UsageDayMark.day == day, UsageDayMark.is_done)
    return await _change(session, mark.values(is_attributed=True))


async def _sum_up_hours(session: AsyncSession, now: datetime, sizes: PartSizes) -> int:
    """Sum up some hours of a tenant with many requests on a day that is not over, or was over a short time ago."""
    end = (now - HOUR_DONE_AFTER).replace(minute=0, second=0, microsecond=0)
    days = [day_of(end), day_of(end) - DAY]
    done = set(await session.scalars(select(UsageDayMark.day).where(UsageDayMark.is_done, UsageDayMark.day.in_(days))))
    for day in days:
        until = min(end, day + DAY)
        if day in done or until == day:
            continue
        for tenant_id in await _busy_tenants(session, day, until, sizes.at_least):
            if changed := await _extend(session, tenant_id, (day, until), sizes):
                return changed
    return 0


async def _busy_tenants(session: AsyncSession, day: datetime, until: datetime, at_least: int) -> Sequence[str]:
    """Return the tenants with many requests within these hours, unless their sums have as many."""
    made = (
        select(AttributedSpan.tenant_id, func.sum(AttributedSpan.requests).label("requests"))
        .where(AttributedSpan.day == day)
        .group_by(AttributedSpan.tenant_id)
        .subquery()
    )
    requests = func.sum(UsageHour.requests)
    hours = (
        select(UsageHour.tenant_id, requests.label("requests"))
        .where(UsageHour.hour >= day, UsageHour.hour < until)
        .group_by(UsageHour.tenant_id)
        .having(requests >= at_least)
        .subquery()
    )
    differs = or_(made.c.requests.is_(None), made.c.requests != hours.c.requests)
    wanted = select(hours.c.tenant_id).outerjoin(made, made.c.tenant_id == hours.c.tenant_id).where(differs)
    return (await session.scalars(wanted.order_by(hours.c.tenant_id))).all()


async def _extend(session: AsyncSession, tenant_id: str, within: Span, sizes: PartSizes) -> int:
    """Sum up the first hours without exact sums that have so many requests; return the number of changed spans."""
    day, until = within
    hours = await hourly_counts(session, tenant_id, [day])
    covered = {hour for span in await exact_spans(session, tenant_id, [day]) for hour in hours_of(span)}
    start, total = None, 0
    for number in range((until - day) // HOUR + 1):
        hour = day + number * HOUR
        more = max(1, hours[hour][_REQUESTS]) if hour in hours else 0  # speculative prefill is no request
        is_free = hour < until and hour not in covered
        if start is not None and (not is_free or total + more > sizes.at_once):
            if total >= sizes.at_least:
                part = [counts for at, counts in hours.items() if start <= at < hour]
                await _sum_up(session, (start, hour), {tenant_id: added(part)})
                return 1
            start = None
        if is_free and start is None:
            start, total = hour, 0
        total += more
    return 0


async def _sum_up(session: AsyncSession, span: Span, counts: Mapping[str, Counts]) -> None:
    """Replace the sums of these tenants in a span of one day; `counts` were read from their hours, before."""
    start, until = span
    table, dialect, tenant_ids = AttributedSum, session.get_bind().dialect.name, sorted(counts)
    spans = (await session.scalars(_overlapping(tenant_ids, span))).all()
    if spans:
        old = [(one.tenant_id, one.start) for one in spans]
        await session.execute(delete(table).where(tuple_(table.tenant_id, table.start).in_(old)))
        same = tuple_(AttributedSpan.tenant_id, AttributedSpan.start).in_(old)
        await session.execute(delete(AttributedSpan).where(same))
    in_time = and_(UsageRecord.started_at >= start, UsageRecord.started_at < until)
    among = UsageFilter(start, until, among=("tenant_id", tuple(tenant_ids)))
    rows = request_amounts(dialect, among, in_time, ("end_user", "tags")).subquery().c
    keys = [rows.tenant_id, *(rows[name] for name in _KEYS)]
    number = func.row_number().over(partition_by=rows.tenant_id, order_by=func.sum(rows.output_tokens).desc())
    sums = [func.sum(rows[name]) for name in AMOUNTS]
    made = select(*keys, literal(start, table.start.type), number, *sums).group_by(*keys)
    columns = ["tenant_id", *_KEYS, "start", "number", *AMOUNTS]
    await session.execute(insert(table).from_select(columns, made))
    values = [
        {"tenant_id": one, "start": start, "until": until, "day": day_of(start)}
        | dict(zip(COUNTS, counts[one], strict=True))
        for one in tenant_ids
    ]
    connection = await session.connection()
    await connection.execute(insert(AttributedSpan), values)


def _overlapping(tenant_ids: Sequence[str], span: Span) -> Any:
    return select(AttributedSpan).where(
        AttributedSpan.tenant_id.in_(tenant_ids),
        AttributedSpan.day == day_of(span[0]),
        AttributedSpan.start < span[1],
        AttributedSpan.until > span[0],
    )


async def _change(session: AsyncSession, statement: Any) -> int:
    connection = await session.connection()
    result: CursorResult[Any] = await connection.execute(statement)
    return result.rowcount
