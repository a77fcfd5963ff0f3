"""Sums of past days, so that a query over a month costs no more than its days. Within the caller's transaction.

Retention sums up a day once, some hours after its end, so requests do no work for it. A transaction that changes hours
of a day that may be summed up already also removes the day's mark, and the day is summed up again. Both lock the day's
mark first, so neither misses the other's changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta

from sqlalchemy import delete, func, insert, literal, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.base import SQLITE_MAX, WideInteger
from moiety_platform.db.dialect import insert_into
from moiety_platform.usage.models import UsageDay, UsageDayMark, UsageHour
from moiety_platform.usage.wide_sums import stored_sum

DAY = timedelta(days=1)
LATE_AFTER = timedelta(hours=1)  # after a day's end: later changes of its hours remove its mark
DONE_AFTER = timedelta(hours=4)  # the day is summed up after this time; clocks may differ by less than the gap

_KEYS = ("tenant_id", "project_id", "key_id", "model", "service_class")
_SUMS = tuple(column.name for column in UsageDay.__table__.columns if not column.primary_key)
_WIDE = tuple(column.name for column in UsageDay.__table__.columns if isinstance(column.type, WideInteger))

Span = tuple[datetime, datetime]


def day_of(moment: datetime) -> datetime:
    """Return the start of the day, in UTC."""
    return moment.astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0)


async def unmark_late(session: AsyncSession, moments: Iterable[datetime]) -> None:
    """Unmark the days of these times, because the sums of their hours are about to change; recent days have no mark."""
    today = day_of(datetime.now(UTC) - LATE_AFTER)
    await unmark(session, {day_of(moment) for moment in moments if moment < today})


async def unmark(session: AsyncSession, days: Iterable[datetime]) -> None:
    """Mark the days as not done and delete their sums, because their hours are about to change."""
    listed = sorted(days)
    if not listed:
        return
    await _mark(session, listed, is_done=False)
    await session.execute(delete(UsageDay).where(UsageDay.day.in_(listed)))


async def sum_up_some(session: AsyncSession, now: datetime) -> int:
    """Sum up the hours of the first past day without sums; return how many days are done by that, 0 if all were."""
    before = day_of(now - DONE_AFTER)
    day = await _first_undone(session, before)
    if day is None:
        return 0
    hour = await session.scalar(select(func.min(UsageHour.hour)).where(UsageHour.hour >= day, UsageHour.hour < before))
    last = before - DAY if hour is None else day_of(hour)  # the days before it are empty
    days = _days(day, last + DAY)
    await _mark(session, days, is_done=True)
    come = await session.scalar(select(func.min(UsageHour.hour)).where(UsageHour.hour >= day, UsageHour.hour < last))
    if come is not None:  # written before this transaction held the marks
        await _mark(session, _days(day_of(come), last), is_done=False)
    keys = [getattr(UsageHour, name) for name in _KEYS]
    dialect = session.get_bind().dialect.name
    sums = [
        (stored_sum(dialect, column) if name in _WIDE else func.sum(column)).label(name)
        for name, column in ((name, getattr(UsageHour, name)) for name in _SUMS)
    ]
    of_day = UsageHour.hour >= last, UsageHour.hour < last + DAY
    made = select(literal(last, UsageDay.day.type).label("day"), *keys, *sums).where(*of_day).group_by(*keys)
    await session.execute(delete(UsageDay).where(UsageDay.day == last))
    await session.execute(insert(UsageDay).from_select(["day", *_KEYS, *_SUMS], made))
    return len(days)


async def longest_done(session: AsyncSession, start: datetime, end: datetime) -> Span | None:
    """Return the longest span within [start, end) in which every day has exact sums; None if there is none.

    Days with a sum that SQLite cannot store are left out, so that their hours are read instead.
    """
    if end - start < DAY:
        return None
    marks = select(UsageDayMark.day).where(
        UsageDayMark.is_done, UsageDayMark.day >= start, UsageDayMark.day <= end - DAY
    )
    if session.get_bind().dialect.name == "sqlite":
        is_too_large = or_(*(getattr(UsageDay, name) >= SQLITE_MAX for name in _WIDE))
        marks = marks.where(
            UsageDayMark.day.not_in(select(UsageDay.day).where(UsageDay.day >= start, UsageDay.day < end, is_too_large))
        )
    best: Span | None = None
    begin = until = start
    for day in await session.scalars(marks.order_by(UsageDayMark.day)):
        begin, until = (begin if day == until else day), day + DAY
        if best is None or until - begin > best[1] - best[0]:
            best = begin, until
    return best


async def _first_undone(session: AsyncSession, before: datetime) -> datetime | None:
    """Return the first day without sums that ended before `before`, counted from the first hour on."""
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
    """Write the marks of the days; they stay locked, in order, until the end of the transaction."""
    marked = insert_into(session, UsageDayMark)
    marks = {name: marked.excluded[name] for name in ("is_done", "is_attributed")}
    changed = marked.on_conflict_do_update(index_elements=[UsageDayMark.day], set_=marks)
    connection = await session.connection()
    await connection.execute(changed, [{"day": day, "is_done": is_done, "is_attributed": False} for day in days])
