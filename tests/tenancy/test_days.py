"""Daily usage sums are created after the day has ended and always equal the sums of its hours."""

from __future__ import annotations

import asyncio
import time
from datetime import UTC, datetime, timedelta
from itertools import product

import pytest
from sqlalchemy import func, literal, select, text, update
from tests.usage_rows import make_row

from moiety_platform.db.base import SQLITE_MAX
from moiety_platform.db.session import Database
from moiety_platform.usage.days import DAY, sum_up_some
from moiety_platform.usage.models import UsageDay, UsageDayMark, UsageHour
from moiety_platform.usage.queries import UsageFilter, sum_usage
from moiety_platform.usage.reconciliation import Reconciliation, reconcile
from moiety_platform.usage.recorder import storable
from moiety_platform.usage.schemas import UsageReport
from moiety_platform.usage.store import insert_rows

from .test_report_pool import DEADLINE_S, STUCK

FIRST = datetime(2026, 3, 1, tzinfo=UTC)
NOW = FIRST + 6 * DAY + timedelta(hours=5)
SPANS = (
    (FIRST, NOW),
    (FIRST + timedelta(hours=5), FIRST + timedelta(days=3, minutes=20)),
    (FIRST + timedelta(minutes=7), FIRST + timedelta(hours=20)),
    (FIRST + DAY, FIRST + 3 * DAY),
    (FIRST + timedelta(days=2, hours=1), FIRST + timedelta(days=2, hours=2)),
)


@pytest.fixture
async def used(database: Database) -> Database:
    """Six days, of which the third had no request."""
    rows = [
        make_row(f"r{number}", tenant_id=f"ten_{number % 3}", started_at=FIRST + timedelta(hours=number, minutes=7),
                 output_tokens=number, slo_attained=number % 4 > 0, cost_nanodollars=number % 7)
        for number in range(6 * 24)
        if number // 24 != 2
    ]  # fmt: skip
    async with database.write() as session:
        await insert_rows(session, rows)
    return database


async def sum_up(database: Database, now: datetime = NOW) -> int:
    num_days = 0
    while True:
        async with database.write() as session:
            done = await sum_up_some(session, now)
        num_days += done
        if not done:
            return num_days


async def reports(database: Database) -> list[UsageReport]:
    async with database.read() as session:
        return [
            await sum_usage(session, UsageFilter(*span, tenant_id=tenant_id), grouping)
            for span in SPANS
            for tenant_id in (None, "ten_1")
            for grouping in ((), ("tenant",), ("key", "model"), ("hour",))
        ]


async def compared(database: Database) -> Reconciliation:
    async with database.read() as session:
        return await reconcile(session, FIRST - DAY, NOW + DAY)


async def num_rows_of_days(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(select(func.count()).select_from(UsageDay)) or 0


async def test_usage_is_the_same_from_days_as_from_hours(used: Database) -> None:
    from_hours = await reports(used)
    assert await sum_up(used) == 6, "the one without requests is done, too"
    assert await num_rows_of_days(used) == 5 * 3
    assert await reports(used) == from_hours
    async with used.write() as session:  # sums of the days are used for a day that lies within
        await session.execute(update(UsageDay).values(requests=UsageDay.requests + 1))
    changed = [after != before for after, before in zip(await reports(used), from_hours, strict=True)]
    by_span = [any(changed[8 * place : 8 * place + 8]) for place in range(len(SPANS))]
    assert by_span == [True, True, False, True, False]
    found = await compared(used)
    assert not found.agrees and [one.tenant_id for one in found.days] == ["ten_0", "ten_1", "ten_2"]


async def test_a_day_is_summed_up_some_hours_after_its_end_and_once(used: Database) -> None:
    assert await sum_up(used, FIRST + DAY + timedelta(hours=3)) == 0
    assert await sum_up(used, FIRST + DAY + timedelta(hours=5)) == 1
    assert await sum_up(used, FIRST + 4 * DAY + timedelta(hours=5)) == 3
    assert await sum_up(used) == 2
    async with used.write() as session:
        assert await sum_up_some(session, NOW + 400 * DAY) == 400, "those in which nothing was, at once"


async def test_late_usage_counts_at_once_and_its_day_is_summed_again(used: Database) -> None:
    await sum_up(used)
    before = (await reports(used))[0].data[0].totals.requests
    late = [make_row(f"late-{day}", started_at=FIRST + day * DAY + timedelta(hours=3)) for day in (1, 2)]
    async with used.write() as session:
        await insert_rows(session, late)
    assert (await reports(used))[0].data[0].totals.requests == before + 2
    assert await sum_up(used) == 2
    assert (await reports(used))[0].data[0].totals.requests == before + 2
    assert (await compared(used)).agrees


async def is_stuck(database: Database) -> bool:
    """Whether somebody waits for a lock; in a transaction of its own, since one sees the same throughout."""
    async with database.read() as session:
        return bool(await session.scalar(text(STUCK)))


async def test_a_row_that_comes_while_its_day_is_being_summed_up_is_not_lost(used: Database, second: Database) -> None:
    await sum_up(used, FIRST + 2 * DAY + timedelta(hours=5))
    for number in (2, 0, 2):  # the day without requests, one that is done, and the first one again
        started_at = FIRST + number * DAY + timedelta(hours=number)
        async with used.write() as session, asyncio.timeout(DEADLINE_S):
            await insert_rows(session, [make_row(f"late-{number}-{time.monotonic_ns()}", started_at=started_at)])
            summing = asyncio.create_task(sum_up(second))
            if used.dialect == "postgresql":  # another process's state: it waits for the mark, or has found all done
                while not summing.done() and not await is_stuck(used):  # noqa: ASYNC110 - as above
                    await asyncio.sleep(0.02)
        await summing
        await sum_up(used)
        assert (await compared(used)).agrees
    async with used.read() as session:
        undone = select(UsageDayMark.day).where(~UsageDayMark.is_done)
        assert (await session.scalars(undone)).all() == []
        requests = [await session.scalar(select(func.sum(table.requests))) for table in (UsageDay, UsageHour)]
    assert requests == [5 * 24 + 3] * 2


LARGEST = 2**56  # bytes that one row can have
BYTES_SPANS = (
    (FIRST, NOW),
    (FIRST, FIRST + timedelta(hours=6)),
    (FIRST - DAY, FIRST + DAY),
    (FIRST - timedelta(minutes=1), FIRST + timedelta(hours=2, minutes=30)),  # with single requests
)


async def test_sums_of_expert_bytes_beyond_64_bits_are_exact(database: Database) -> None:
    starts = [FIRST + timedelta(hours=n // 100) for n in range(300)]
    rows = [make_row(f"r{n}", started_at=start, end_user="u", expert_read_bytes=LARGEST - n, expert_moved_bytes=n)
            for n, start in enumerate(starts)]  # fmt: skip
    before = make_row("r-before", started_at=FIRST - DAY, end_user="u", expert_read_bytes=7)
    async with database.write() as session:
        await insert_rows(session, [*rows, before])
    for _ in ("from hours", "from days"):
        for (since, until), grouping in product(BYTES_SPANS, ((), ("tenant",), ("hour",), ("end_user",))):
            inside = [row for row in [*rows, before] if since <= row.started_at < until]
            async with database.read() as session:
                groups = (await sum_usage(session, UsageFilter(since, until), grouping)).data
            read = sum(group.totals.expert_read_bytes or 0 for group in groups)
            assert read == sum(row.expert_read_bytes for row in inside) > 2**63
            moved = sum(group.totals.expert_moved_bytes or 0 for group in groups)
            assert moved == sum(row.expert_moved_bytes for row in inside)
        await sum_up(database)
    assert await num_rows_of_days(database) == 2


async def test_expert_bytes_of_an_hour_beyond_64_bits_stay_an_integer(database: Database) -> None:
    for part in range(2):
        rows = [make_row(f"r{part}-{n}", started_at=FIRST, expert_read_bytes=2**62 + 1) for n in range(100)]
        async with database.write() as session:
            await insert_rows(session, [storable(row) for row in rows])
    kind = func.typeof(UsageHour.expert_read_bytes) if database.dialect == "sqlite" else literal("integer")
    async with database.read() as session:
        stored = (await session.execute(select(UsageHour.expert_read_bytes, kind))).one()
    assert tuple(stored) == (SQLITE_MAX if database.dialect == "sqlite" else 200 * LARGEST, "integer")
    async with database.write() as session:  # one statement with a larger sum than SQLite has
        await insert_rows(session, [make_row(f"s{n}", started_at=NOW, expert_read_bytes=LARGEST) for n in range(200)])
    async with database.read() as session:
        stored_now = await session.scalar(select(UsageHour.expert_read_bytes).where(UsageHour.hour > FIRST))
    assert stored_now == stored[0]
