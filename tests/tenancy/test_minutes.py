"""Usage sums by the minute, from which the dashboard draws the last hours."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from tests.usage_rows import make_row

from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.usage.minutes import purge_minutes
from moiety_platform.usage.store import insert_rows


async def record(database: Database, *rows: Any) -> None:
    async with database.write() as session:
        await insert_rows(session, rows)


async def test_a_request_counts_once_in_the_minute_that_it_ended_in(
    admin: Any, demo: Any, database: Database, clock: ManualClock
) -> None:
    start = clock.now()
    rows = [
        make_row("kept", tenant_id=demo.tenant_id, started_at=start, duration_ms=70_000.0, slo_attained=True),
        make_row("missed", tenant_id=demo.tenant_id, started_at=start, ttft_ms=None, slo_attained=False),
        make_row("refused", tenant_id=demo.tenant_id, started_at=start, service_class="flex", outcome="rejected"),
    ]
    await record(database, *rows)
    await record(database, rows[0])  # told again
    clock.advance(120)
    report = await admin.call("GET", "usage/minutes", 200, params={"group_by": "service_class,tenant"})
    found = [(one["at"], one["group"]["service_class"], one["totals"]["requests"]) for one in report["data"]]
    first, second = "2026-01-01T00:00:00Z", "2026-01-01T00:01:00Z"
    assert found == [(first, "flex", 1), (first, "standard", 1), (second, "standard", 1)]
    assert {one["group"]["tenant_name"] for one in report["data"]} == {"acme"}
    (whole,) = (await admin.call("GET", "usage/minutes", 200, params={"step": "60"}))["data"]
    totals = whole["totals"]
    assert (totals["requests"], totals["rejected"], totals["num_slo_attained"], totals["num_slo_requests"]) == (
        3,
        1,
        1,
        2,
    )
    assert (totals["good_tokens"], totals["output_tokens"], totals["mean_ttft_ms"]) == (7, 21, 12.25)


async def test_slots_are_as_long_as_is_asked_and_filters_hold(
    admin: Any, demo: Any, database: Database, clock: ManualClock
) -> None:
    await record(
        database,
        *(
            make_row(f"r{n}", tenant_id=demo.tenant_id, started_at=clock.now() + timedelta(minutes=n), duration_ms=0.0)
            for n in range(10)
        ),
        make_row("other", tenant_id="ten_other", started_at=clock.now(), service_class="batch"),
    )
    clock.advance(600)
    query = {"step": "5", "since": "2026-01-01T00:00:00Z", "tenant_id": demo.tenant_id}
    sums = (await admin.call("GET", "usage/minutes", 200, params=query))["data"]
    assert [one["totals"]["requests"] for one in sums] == [5, 5]
    (batch,) = (await admin.call("GET", "usage/minutes", 200, params={"step": "60", "service_class": "batch"}))["data"]
    assert batch["totals"]["requests"] == 1


async def test_minutes_go_after_some_hours_and_are_asked_for_no_further_back(
    admin: Any, demo: Any, database: Database, clock: ManualClock
) -> None:
    await record(database, make_row("r", tenant_id=demo.tenant_id, started_at=clock.now()))
    async with database.write() as session:
        assert await purge_minutes(session, clock.now() - timedelta(minutes=1)) == 0
        assert await purge_minutes(session, clock.now() + timedelta(minutes=1)) == 1
    clock.advance(24 * 3600)
    report = await admin.call("GET", "usage/minutes", 200, params={"since": "2026-01-01T00:00:00Z"})
    assert (report["since"], report["data"]) == ("2026-01-01T18:00:00Z", [])


async def test_invalid_ranges_are_refused(admin: Any) -> None:
    for query in ({"step": "0"}, {"step": "61"}, {"group_by": "key"}, {"group_by": "tenant,tenant"}):
        refusal = await admin.call("GET", "usage/minutes", 400, params=query)
        assert [refusal["error"]["param"]] == list(query)
