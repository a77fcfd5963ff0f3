"""The request log: every request is found by each of its properties, and by nobody else's administrator."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from sqlalchemy import text
from tests.usage_rows import make_row

from moiety_platform.access.roles import Role
from moiety_platform.auth.schemas import NewKey
from moiety_platform.auth.service import create_key
from moiety_platform.clock import ManualClock
from moiety_platform.db.paging import PageRequest
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.request_log.queries import RequestSearch, parse_status, read_request, search_requests
from moiety_platform.trace_store.models import TraceRecord
from moiety_platform.usage.models import UsageRecord
from moiety_platform.usage.queries import UsageFilter
from moiety_platform.usage.store import insert_rows

from .conftest import PEPPER, Admin, Demo

NUM_REQUESTS = 24


@pytest.fixture
async def logged(database: Database, demo: Demo, clock: ManualClock) -> None:
    """A day of requests of two tenants: served, failed, refused and disconnected, some with a stored trace."""
    rows = []
    ends: list[tuple[str, int, str | None]] = [
        ("stop", 200, None), ("failed", 500, "engine_failed"), ("rejected", 429, "quota_exceeded"),
        ("disconnected", 499, "client_disconnected"), ("failed", 200, "engine_failed"),
    ]  # fmt: skip
    for number in range(NUM_REQUESTS):
        outcome, status, error = ends[number % len(ends)]
        row = make_row(
            f"r{number}", tenant_id=demo.tenant_id if number % 2 else "ten_b", model=f"m{number % 3}",
            key_id=f"key_{number % 4}", project_id=f"prj_{number % 2}", service_class=("standard", "flex")[number % 2],
            started_at=clock.now() - timedelta(minutes=59 * number + 1), outcome=outcome, http_status=status,
            error_code=error, duration_ms=float(number * 100), slo_attained=(True, False, None)[number % 3],
            cost_nanodollars=number,
        )  # fmt: skip
        extra = {
            "route": "fast" if number % 6 == 0 else None,
            "trace_id": f"{number:032x}",
            "end_user": "ann" if number % 8 == 0 else None,
        }
        rows.append(msgspec.structs.replace(row, **extra, tags='{"team":"ads"}' if number % 5 == 0 else None))
    async with database.write() as session:
        await insert_rows(session, rows)
        for number in (1, 2):
            trace = TraceRecord(
                trace_id=f"{number:032x}", span_id="0" * 16, request_id=f"r{number}", started_at=clock.now(),
                tenant_id=rows[number].tenant_id, service_class="standard", operation="chat", model="m",
                duration_ms=1.0, outcome="stop", kept_for="rate", stored_ms=0,
            )  # fmt: skip
            session.add(trace)


async def numbers(admin: Admin, **params: Any) -> list[int]:
    """The numbers of the requests that are found, newest first, over all pages."""
    found: list[int] = []
    cursor = None
    while True:
        given = {"limit": 5, **params, **({} if cursor is None else {"cursor": cursor})}
        page = await admin.call("GET", "requests", 200, params=given)
        found += [int(one["request_id"][1:]) for one in page["data"]]
        cursor = page["next_cursor"]
        if cursor is None:
            return found


SEARCHES: list[tuple[dict[str, Any], Any]] = [
    ({}, lambda n: True),
    ({"model": "m1"}, lambda n: n % 3 == 1),
    ({"key_id": "key_3"}, lambda n: n % 4 == 3),
    ({"project_id": "prj_1"}, lambda n: n % 2 == 1),
    ({"service_class": "flex"}, lambda n: n % 2 == 1),
    ({"outcome": "failed"}, lambda n: n % 5 in (1, 4)),
    ({"status": "429"}, lambda n: n % 5 == 2),
    ({"status": "4xx"}, lambda n: n % 5 in (2, 3)),
    ({"status": "2XX"}, lambda n: n % 5 in (0, 4)),
    ({"error_code": "engine_failed"}, lambda n: n % 5 in (1, 4)),
    ({"error_code": "engine_failed", "status": "200"}, lambda n: n % 5 == 4),
    ({"route": "fast"}, lambda n: n % 6 == 0),
    ({"slo": "missed"}, lambda n: n % 3 == 1),
    ({"slo": "none", "status": "5xx"}, lambda n: n % 3 == 2 and n % 5 == 1),
    ({"min_ms": "1500"}, lambda n: n >= 15),
    ({"end_user": "ann"}, lambda n: n % 8 == 0),
    ({"tag": "team=ads", "slo": "attained"}, lambda n: n % 15 == 0),
    ({"request_id": "r7"}, lambda n: n == 7),
    ({"request_id": "r7", "status": "429"}, lambda n: n == 7),
    ({"request_id": "unknown"}, lambda n: False),
]


@pytest.mark.usefixtures("logged")
@pytest.mark.every_value
@pytest.mark.parametrize(("search", "matches"), SEARCHES)
async def test_requests_are_found_by_their_properties(admin: Admin, search: dict[str, Any], matches: Any) -> None:
    assert await numbers(admin, **search) == [number for number in range(NUM_REQUESTS) if matches(number)]


@pytest.mark.usefixtures("logged")
async def test_a_search_has_a_time_unless_it_is_for_one_request(admin: Admin, clock: ManualClock) -> None:
    since = (clock.now() - timedelta(hours=3)).isoformat()
    assert await numbers(admin, since=since) == [0, 1, 2, 3]
    assert await numbers(admin, since=since, request_id="r9") == []
    clock.advance(40 * 24 * 3600)
    assert await numbers(admin) == []
    assert await numbers(admin, request_id="r9") == [9]
    assert (await admin.call("GET", "requests/r9", 200))["key_id"] == "key_1"


@pytest.mark.usefixtures("logged")
async def test_a_request_is_shown_with_its_trace_if_that_is_stored(admin: Admin) -> None:
    page = (await admin.call("GET", "requests", 200, params={"limit": 3}))["data"]
    assert [one["has_trace"] for one in page] == [False, True, True]
    one = await admin.call("GET", "requests/r2", 200)
    assert one == page[2]
    assert one["trace_id"] == f"{2:032x}" and one["has_trace"]
    assert (one["outcome"], one["http_status"], one["error_code"]) == ("rejected", 429, "quota_exceeded")
    assert (one["cost_nanodollars"], one["ttft_ms"], one["slo_attained"]) == (2, 12.25, None)
    missing = await admin.call("GET", "requests/nobody", 404)
    assert missing["error"]["code"] == "request_not_found"


@pytest.mark.usefixtures("logged")
async def test_the_log_is_shown_without_a_trace_store(database: Database, clock: ManualClock, tmp_path: Path) -> None:
    usage = UsageFilter(clock.now() - timedelta(days=1), clock.now())
    gone = Database.open(f"sqlite+aiosqlite:///{tmp_path / 'none.db'}")
    try:
        found = await search_requests(database, gone, RequestSearch(usage=usage), PageRequest(limit=3))
        assert [(one.request_id, one.has_trace) for one in found.data] == [("r0", None), ("r1", None), ("r2", None)]
        assert (await read_request(database, gone, "r2")).has_trace is None
    finally:
        await gone.close()


@pytest.mark.usefixtures("logged")
async def test_a_tenants_administrator_sees_its_own_requests(
    database: Database, app: Any, demo: Demo, clock: ManualClock
) -> None:
    async with database.write() as session:
        new = NewKey(name="mine", role=Role.VIEWER, tenant_id=demo.tenant_id)
        _, key = await create_key(session, new, PEPPER, clock.now())
    viewer = Admin(app, key.text)
    async with viewer.http:
        assert await numbers(viewer) == [number for number in range(NUM_REQUESTS) if number % 2]
        assert await numbers(viewer, status="4xx") == [3, 7, 13, 17, 23]
        assert await numbers(viewer, request_id="r2") == []
        await viewer.call("GET", "requests/r2", 404)
        own = await viewer.call("GET", "requests/r1", 200)
    assert own["has_trace"] and own["expert_read_bytes"] is None


def test_statuses_are_read_as_numbers_and_classes() -> None:
    found = {given: parse_status(given) for given in ("429", "4xx", "5XX", "200")}
    spans = {given: (one.low, one.high) for given, one in found.items() if one is not None}
    assert spans == {"429": (429, 429), "4xx": (400, 499), "5XX": (500, 599), "200": (200, 200)}
    for wrong in ("", "4x", "42", "600", "4x9", "xxx", "4290", " 429"):
        with pytest.raises(BadRequest, match="'status' must be"):
            parse_status(wrong)


@pytest.mark.usefixtures("logged")
async def test_unsuccessful_requests_are_found_by_their_index(
    database: Database, clock: ManualClock, admin: Admin
) -> None:
    await admin.call("GET", "requests?slo=maybe", 400)
    for tenant_id, name in ((None, "ix_usage_unsuccessful"), ("ten_b", "ix_usage_unsuccessful_tenant")):
        usage = UsageFilter(clock.now() - timedelta(days=1), clock.now(), tenant_id=tenant_id)
        search = RequestSearch(usage=usage, status=parse_status("5xx"))
        assert search.is_unsuccessful
        plan = await plan_of(database, search)
        if database.engine.dialect.name == "sqlite":
            assert f"INDEX {name} (" in plan, plan
        else:  # by the number of rows, either is the better one
            assert "ix_usage_unsuccessful" in plan, plan
    successful = RequestSearch(usage=usage, status=parse_status("2xx"))
    assert not successful.is_unsuccessful and "unsuccessful" not in await plan_of(database, successful)


async def plan_of(database: Database, search: RequestSearch) -> str:
    """The database's plan of the first page."""
    async with database.read() as session:
        dialect = session.get_bind().dialect
        order = UsageRecord.started_at.desc(), UsageRecord.request_id.desc()
        statement = search.statement(dialect.name).order_by(*order).limit(5)
        written = statement.compile(dialect=dialect, compile_kwargs={"literal_binds": True})
        if dialect.name == "postgresql":
            await session.execute(text("SET LOCAL enable_seqscan = off"))
        explain = "EXPLAIN QUERY PLAN" if dialect.name == "sqlite" else "EXPLAIN"
        return " ".join(str(one) for one in (await session.execute(text(f"{explain} {written}"))).all())
