"""Sums of days that are long over, so that a month costs no more than its days. Within the caller's transaction.

A day is summed up once, by retention, some hours after its end; so requests pay nothing for it. Whoever changes
hours of a
day that may be summed up already unmarks it in the same transaction, and it is summed up anew. Both lock the day's mark
first, so neither misses what the other does.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, insert, literal, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.dialect import insert_into
from moiety_platform.usage.models import UsageDay, UsageDayMark, UsageHour

DAY = timedelta(days=1)
LATE_AFTER = timedelta(hours=1)  # after a day's end: what changes its hours from then on unmarks it
DONE_AFTER = timedelta(hours=4)  # and so much later it is summed up, by clocks that may differ meanwhile

_KEYS = ("tenant_id", "project_id", "key_id", "model", "service_class")
_SUMS = tuple(column.name for column in UsageDay.__table__.columns if not column.primary_key)

Span = tuple[datetime, datetime]


def day_of(moment: datetime) -> datetime:
    """When its day began, UTC."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


async def unmark_late(session: AsyncSession, moments: Iterable[datetime]) -> None:
    """Requests of these moments are about to change the sums of their hours."""
    today = day_of(datetime.now(UTC) - LATE_AFTER)
    await unmark(session, {day_of(moment) for moment in moments if moment < today})


async def unmark(session: AsyncSession, days: Iterable[datetime]) -> None:
    """Hours of these days are about to change: their days' sums are gone, to be made anew."""
    listed = sorted(days)
    if not listed:
        return
    await _mark(session, listed, is_done=False)
    await session.execute(delete(UsageDay).where(UsageDay.day.in_(listed)))


async def sum_up_some(session: AsyncSession, now: datetime) -> int:
    """Sum up the hours of one day that is long over, the first that has no sums; how many days are done by that, 0
    where all of them were."""
    before = day_of(now - DONE_AFTER)
    day = await _first_undone(session, before)
    if day is None:
        return 0
    hour = await session.scalar(select(func.min(UsageHour.hour)).where(UsageHour.hour >= day, UsageHour.hour < before))
    last = before - DAY if hour is None else day_of(hour)  # there is nothing in the days before it
    days = _days(day, last + DAY)
    await _mark(session, days, is_done=True)
    come = await session.scalar(select(func.min(UsageHour.hour)).where(UsageHour.hour >= day, UsageHour.hour < last))
    if come is not None:  # before the marks were ours
        await _mark(session, _days(day_of(come), last), is_done=False)
    keys = [getattr(UsageHour, name) for name in _KEYS]
    sums = [func.sum(getattr(UsageHour, name)).label(name) for name in _SUMS]
    of_day = UsageHour.hour >= last, UsageHour.hour < last + DAY
    made = select(literal(last, UsageDay.day.type).label("day"), *keys, *sums).where(*of_day).group_by(*keys)
    await session.execute(delete(UsageDay).where(UsageDay.day == last))
    await session.execute(insert(UsageDay).from_select(["day", *_KEYS, *_SUMS], made))
    return len(days)


async def longest_done(session: AsyncSession, start: datetime, end: datetime) -> Span | None:
    """The longest time within [start, end) of which every day is summed up."""
    if end - start < DAY:
        return None
    marks = select(UsageDayMark.day).where(
        UsageDayMark.is_done, UsageDayMark.day >= start, UsageDayMark.day <= end - DAY
    )
    best: Span | None = None
    begin = until = start
    for day in await session.scalars(marks.order_by(UsageDayMark.day)):
        begin, until = (begin if day == until else day), day + DAY
        if best is None or until - begin > best[1] - best[0]:
            best = begin, until
    return best


async def _first_undone(session: AsyncSession, before: datetime) -> datetime | None:
    """The first day from the first hour on that ended before that and has no sums."""
    first: datetime | None = await session.scalar(select(func.min(UsageHour.hour)))
    if first is None:
        return None
    done = set(await session.scalars(select(UsageDayMark.day).where(UsageDayMark.is_done)))
    day = day_of(first)
    while day in done:
        day += DAY
    return day if day < before else None


def _days(first: datetime, before: datetime) -> list[datetime]:
    return [first + number * DAY for number in range((before - first) // DAY)]


async def _mark(session: AsyncSession, days: list[datetime], *, is_done: bool) -> None:
    """Locks the marks, in order, to the end of the transaction."""
    marked = insert_into(session, UsageDayMark)
    changed = marked.on_conflict_do_update(index_elements=[UsageDayMark.day], set_={"is_done": marked.excluded.is_done})
    connection = await session.connection()
    await connection.execute(changed, [{"day": day, "is_done": is_done} for day in days])
