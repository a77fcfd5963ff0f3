"""Sums by end user and tags: reports from them equal reports from single requests, whatever happened since."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from functools import partial

import msgspec
import pytest
from sqlalchemy import delete, func, insert, select, update
from tests.usage_rows import make_row

from moiety_platform.db.session import Database
from moiety_platform.spend.queries import report_spend
from moiety_platform.spend.schemas import SpendReport
from moiety_platform.tenant_deletion.names import blank_attribution, blank_models
from moiety_platform.tenants.models import TenantDeletion
from moiety_platform.usage.attributed_sums import PartSizes, sum_up_attributed
from moiety_platform.usage.days import DAY, sum_up_some
from moiety_platform.usage.ledger_entries import add_to_hours
from moiety_platform.usage.models import AttributedSpan, AttributedSum, UsageDayMark, UsageRecord
from moiety_platform.usage.purge import purge_requests
from moiety_platform.usage.queries import UsageFilter, sum_usage
from moiety_platform.usage.row import GATEWAY_KILLED, UsageRow
from moiety_platform.usage.schemas import UsageReport
from moiety_platform.usage.store import insert_rows

from .conftest import Demo

FIRST = datetime(2026, 3, 1, tzinfo=UTC)
NOW = FIRST + 4 * DAY + timedelta(hours=6, minutes=30)
LARGEST = 2**56  # bytes that one row can have
SPANS = ((FIRST, NOW), (FIRST + timedelta(hours=5), FIRST + timedelta(days=3, minutes=20)))
REPORTS: tuple[tuple[tuple[str, ...], dict[str, object]], ...] = (
    (("end_user",), {"tenant_id": "ten_0"}),
    (("day", "end_user", "tag:team"), {"tenant_id": "ten_1", "model": "m1"}),
    (("day",), {"tenant_id": "ten_0", "end_user": "user-2"}),
    (("tag:team",), {"tenant_id": "ten_1", "tag": ("team", "ads")}),
    (("tenant", "key", "end_user"), {}),
    (("hour", "end_user"), {"tenant_id": "ten_1"}),
)
SMALL = PartSizes(at_once=40, at_least=4)

Reports = list[UsageReport | SpendReport]


def a_row(number: int, **fields: object) -> UsageRow:
    user, team = number % 5, ("ads", "search", None)[number % 3]
    defaults: dict[str, object] = {
        "tenant_id": f"ten_{number % 2}",
        "model": f"m{number % 2}",
        "started_at": FIRST + timedelta(hours=number // 4, minutes=number % 60),
        "end_user": f"user-{user}" if user else None,
        "tags": f'{{"team":"{team}"}}' if team else None,
        "output_tokens": number % 11,
        "cost_nanodollars": 10**12 + number,
        "outcome": "failed" if number % 13 == 0 else "stop",
        "slo_attained": number % 4 > 0,
        "expert_read_bytes": LARGEST - number,
    }
    return make_row(f"r{number}", **(defaults | fields))


@pytest.fixture
async def used(database: Database) -> Database:
    """Four days and some hours."""
    async with database.write() as session:
        await insert_rows(session, [a_row(number) for number in range(4 * 24 * 4 + 26)])
    return database


async def reports(database: Database) -> Reports:
    async with database.read() as session:
        return [
            await report(session, UsageFilter(*span, **filters), grouping)
            for span in SPANS
            for grouping, filters in REPORTS
            for report in (sum_usage, report_spend)
        ]


async def from_requests(database: Database) -> Reports:
    """Return the reports that read every request."""
    async with database.write() as session:
        kept = (await session.execute(select(AttributedSpan.__table__))).mappings().all()
        await session.execute(delete(AttributedSpan))
    found = await reports(database)
    if kept:
        async with database.write() as session:
            await session.execute(insert(AttributedSpan), [dict(one) for one in kept])
    return found


async def sum_up(database: Database, now: datetime = NOW, sizes: PartSizes = SMALL) -> int:
    total = 0
    for job in (sum_up_some, partial(sum_up_attributed, sizes=sizes)):
        while True:
            async with database.write() as session:
                done = await job(session, now)
            if not done:
                break
            total += done
    return total


async def covered(database: Database) -> list[tuple[str, datetime, datetime]]:
    async with database.read() as session:
        spans = select(AttributedSpan.tenant_id, AttributedSpan.start, AttributedSpan.until)
        rows = await session.execute(spans.order_by(AttributedSpan.start, AttributedSpan.tenant_id))
        return [tuple(row) for row in rows]  # type: ignore[misc]


async def test_reports_from_sums_equal_reports_from_requests(used: Database) -> None:
    expected = await reports(used)
    await sum_up(used)
    assert await reports(used) == expected
    days = [start for _, start, until in await covered(used) if until - start == DAY]
    assert not days, "of a day with more requests than are summed up at once, each part is a span"
    parts = [(start, until) for tenant, start, until in await covered(used) if tenant == "ten_1"]
    assert all(until - start <= 20 * timedelta(hours=1) for start, until in parts)
    today = [(start, until) for start, until in parts if start >= FIRST + 4 * DAY]
    assert today[0][0] == FIRST + 4 * DAY and today[-1][1] == FIRST + 4 * DAY + timedelta(hours=6)
    async with used.write() as session:  # so the reports do read the sums
        await session.execute(update(AttributedSum).values(requests=AttributedSum.requests + 1))
    changed = [one.data != other.data for one, other in zip(await reports(used), expected, strict=True)]
    assert changed == [grouping[0] != "hour" for _ in SPANS for grouping, _ in REPORTS for _ in range(2)]


async def test_a_small_day_is_one_span_of_each_tenant(used: Database) -> None:
    large = PartSizes(at_once=100, at_least=4)
    await sum_up(used, sizes=large)
    whole = {(tenant, start) for tenant, start, until in await covered(used) if until - start == DAY}
    assert whole == {(f"ten_{number}", FIRST + day * DAY) for number in range(2) for day in range(4)}
    assert await reports(used) == await from_requests(used)
    assert await sum_up(used, sizes=large) == 0


async def test_late_rows_count_at_once_and_their_span_is_summed_up_again(used: Database) -> None:
    await sum_up(used)
    late = [a_row(5000 + day, started_at=FIRST + day * DAY + timedelta(hours=3)) for day in (0, 1, 3, 4)]
    async with used.write() as session:
        await insert_rows(session, late)
    found = await reports(used)
    assert found == await from_requests(used)
    assert await sum_up(used) > 0
    assert await reports(used) == found
    assert await sum_up(used) == 0


async def test_a_late_row_of_a_gateway_without_these_sums_counts_at_once(used: Database) -> None:
    """Such a gateway sums up the day again, and leaves the mark that all sums were found."""
    await sum_up(used)
    async with used.write() as session:
        await insert_rows(session, [a_row(5000, started_at=FIRST + timedelta(hours=3))])
        await sum_up_some(session, NOW)
        await session.execute(update(UsageDayMark).values(is_done=True, is_attributed=True))
    assert await reports(used) == await from_requests(used)


async def test_a_corrected_request_counts_with_its_new_end_user(used: Database) -> None:
    killed = a_row(5000, started_at=FIRST + timedelta(hours=3), error_code=GATEWAY_KILLED, outcome="failed")
    async with used.write() as session:
        await insert_rows(session, [killed])
    await sum_up(used)
    async with used.write() as session:
        await insert_rows(session, [msgspec.structs.replace(killed, error_code=None, end_user="late", ttft_ms=90.0)])
    found = await reports(used)
    assert found == await from_requests(used)
    await sum_up(used)
    assert await reports(used) == found
    async with used.read() as session:
        assert await session.scalar(select(func.count()).where(AttributedSum.end_user == "late")) == 1


async def test_sums_of_deleted_requests_are_deleted(used: Database) -> None:
    await sum_up(used)
    async with used.write() as session:
        assert await purge_requests(session, FIRST + DAY + timedelta(hours=2))
    assert await reports(used) == await from_requests(used), "before the next round of the job, too"
    assert await sum_up(used) > 0
    assert await reports(used) == await from_requests(used)
    assert min(start for _, start, _ in await covered(used)) == FIRST + 2 * DAY
    async with used.read() as session:
        assert await session.scalar(select(func.min(AttributedSum.start))) == FIRST + 2 * DAY


async def named(database: Database) -> set[str]:
    """Return the tenants that have an end user, tag or made-up model in their sums."""
    table = AttributedSum
    is_named = table.end_user.is_not(None) | table.tags.is_not(None) | (table.model == "made-up")
    async with database.read() as session:
        return set(await session.scalars(select(table.tenant_id).where(is_named)))


async def test_sums_of_a_deleted_tenant_name_nobody_and_stay_exact(used: Database) -> None:
    made_up = [a_row(5000 + 2 * n, model="made-up", output_tokens=0, started_at=FIRST + n * DAY) for n in range(3)]
    async with used.write() as session:
        await insert_rows(session, made_up)
    await sum_up(used)
    assert await named(used) == {"ten_0", "ten_1"}
    for blank in (blank_attribution, blank_models):
        counts = -1
        while counts:
            async with used.write() as session:
                counts = (await blank(session, "ten_0")).total()
    assert await named(used) == {"ten_1"}
    found = await reports(used)
    assert found == await from_requests(used)
    await sum_up(used)
    assert await reports(used) == found and await named(used) == {"ten_1"}


async def test_sums_made_while_a_tenant_is_deleted_are_blanked_later(used: Database, demo: Demo) -> None:
    """Also those of a tenant that was deleted by a gateway without these sums."""
    whose = {"tenant_id": demo.tenant_id, "project_id": demo.project_id, "key_id": demo.key_id}
    async with used.write() as session:
        await insert_rows(session, [a_row(5000 + n, **whose, started_at=FIRST) for n in range(9)])
    await sum_up(used)
    assert demo.tenant_id in await named(used)
    async with used.write() as session:
        deletion = {"tenant_id": demo.tenant_id, "begun_at": NOW, "ended_at": NOW, "counts": {}}
        await session.execute(insert(TenantDeletion).values(deletion))
        of_tenant = update(UsageRecord).where(UsageRecord.tenant_id == demo.tenant_id)
        await session.execute(of_tenant.values(end_user=None, tags=None))
    await sum_up(used, NOW + timedelta(minutes=1))
    assert await named(used) == {"ten_0", "ten_1"}
    assert await reports(used) == await from_requests(used)


async def test_a_tenant_with_a_new_end_user_in_each_request_has_as_many_sums(database: Database) -> None:
    rows = [a_row(2 * n, started_at=FIRST + timedelta(minutes=n), end_user=f"user-{n}") for n in range(1200)]
    async with database.write() as session:
        await insert_rows(session, rows)
        await insert_rows(session, [a_row(2 * n + 1, started_at=FIRST + timedelta(minutes=n)) for n in range(100)])
    expected = await reports(database)
    await sum_up(database)
    assert await reports(database) == expected
    async with database.read() as session:
        numbers = select(AttributedSum.tenant_id, func.count()).group_by(AttributedSum.tenant_id)
        found = {row[0]: row[1] for row in await session.execute(numbers)}
    assert found["ten_0"] == 1200 and found["ten_1"] <= 30


async def test_speculative_prefill_is_summed_up_though_it_is_no_request(database: Database) -> None:
    rows = [
        a_row(2 * n, started_at=FIRST + timedelta(hours=3), endpoint="speculative_prefill", speculative_tokens=7)
        for n in range(3)
    ]
    async with database.write() as session:
        await insert_rows(session, rows)
    expected = await reports(database)
    await sum_up(database)
    assert await reports(database) == expected
    assert [(tenant, until - start) for tenant, start, until in await covered(database)] == [("ten_0", DAY)]


async def test_hours_without_changed_counts_keep_their_spans(used: Database) -> None:
    await sum_up(used)
    before = await covered(used)
    moved = a_row(8, started_at=FIRST + timedelta(hours=2, minutes=8))
    async with used.write() as session:  # what a correction does that changes nothing
        await add_to_hours(session, [moved], [moved])
    assert await sum_up(used) > 0
    assert await covered(used) == before
