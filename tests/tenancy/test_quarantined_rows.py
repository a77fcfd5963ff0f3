"""Usage rows that the database refuses: quarantined only for errors proved to be theirs, counted, and written back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import timedelta
from pathlib import Path

import pytest
import sqlalchemy as sa
from litestar import Litestar
from tests.usage_rows import make_row

from moiety_platform.administration.router import admin_router
from moiety_platform.auth.authenticator import Authenticator
from moiety_platform.classes.cache import ClassCache
from moiety_platform.cli.usage import show_reconciliation
from moiety_platform.cli.usage_restore import restore_rows
from moiety_platform.clock import ManualClock
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.quota.enforcer import QuotaEnforcer
from moiety_platform.quota.store import LeaseStore
from moiety_platform.request_rules.cache import RequestRulesCache
from moiety_platform.settings import GatewaySettings
from moiety_platform.usage.models import LedgerEntry, UsageRecord
from moiety_platform.usage.quarantined_rows import QuarantinedUsage, QuarantinedUsageReport

from .conftest import PEPPER, Admin, Demo
from .test_recorder import recording, stored_ids

TABLE = UsageRecord.__tablename__
CHECK_VIOLATION = "23514"
NOT_THE_ROWS_OWN = [
    "08P01",  # a pooler's protocol error
    "25006",  # read-only
    "26000",  # a prepared statement that is not there
    "40P01",  # deadlock
    "42P05",  # a prepared statement that is there already
    "53100",  # disk full
    "0A000",  # a cached plan that does not hold any more
    "42883",  # a function that is missing
    "XX000",  # an internal error
]

Break = Callable[..., Awaitable[None]]


async def run_all(database: Database, statements: list[str]) -> None:
    async with database.write() as session:
        for statement in statements:
            await session.execute(sa.text(statement))


@pytest.fixture
async def break_inserts(database: Database) -> AsyncIterator[Break]:
    """Has the database refuse rows: those with the id, or all."""

    async def break_with(state: str = CHECK_VIOLATION, request_id: str = "") -> None:
        condition = f"WHEN (NEW.request_id = '{request_id}')" if request_id else ""
        if database.dialect == "sqlite":
            await run_all(
                database,
                [f"CREATE TRIGGER broken BEFORE INSERT ON {TABLE} {condition} BEGIN SELECT RAISE(ABORT, 'no'); END"],
            )
            return
        body = f"BEGIN RAISE EXCEPTION 'broken' USING ERRCODE = '{state}'; END"
        on_row = f"BEFORE INSERT ON {TABLE} FOR EACH ROW {condition} EXECUTE FUNCTION broken()"
        await run_all(
            database,
            [
                f"CREATE OR REPLACE FUNCTION broken() RETURNS trigger LANGUAGE plpgsql AS $$ {body} $$",
                f"CREATE TRIGGER broken {on_row}",
            ],
        )

    yield break_with
    await mend(database)


async def mend(database: Database) -> None:
    on_table = "" if database.dialect == "sqlite" else f" ON {TABLE}"
    await run_all(database, [f"DROP TRIGGER IF EXISTS broken{on_table}"])


async def num_billed(database: Database) -> int:
    async with database.read() as session:
        return await session.scalar(sa.select(sa.func.count()).select_from(LedgerEntry)) or 0


async def test_while_every_row_is_refused_none_is_quarantined_and_all_are_stored_afterwards(
    database: Database, tmp_path: Path, break_inserts: Break
) -> None:
    await break_inserts()
    async with recording(database, tmp_path / "journal", interval_s=60.0) as recorder:
        for number in range(20):
            recorder.record(make_row(f"r{number:02}"))
        with pytest.raises(Unavailable):
            await recorder.flush()
        assert recorder.stats().refused == 0
        assert recorder.stats().journal_waiting
        await mend(database)
        await recorder.flush()
        assert not recorder.stats().journal_waiting
    assert len(await stored_ids(database)) == await num_billed(database) == 20
    assert QuarantinedUsage(tmp_path / "journal").report().total == 0


@pytest.mark.parametrize("dialect", ["postgresql"], indirect=True)
@pytest.mark.parametrize("state", NOT_THE_ROWS_OWN)
async def test_a_row_that_fails_for_a_reason_that_is_not_its_own_is_tried_until_it_is_stored(
    database: Database, tmp_path: Path, break_inserts: Break, state: str
) -> None:
    await break_inserts(state, request_id="odd")
    async with recording(database, tmp_path / "journal", interval_s=60.0) as recorder:
        for request_id in ("a", "odd", "b"):
            recorder.record(make_row(request_id))
        for _ in range(2):
            with pytest.raises(Unavailable):
                await recorder.flush()
        recorder.record(make_row("c"))
        with pytest.raises(Unavailable):
            await recorder.flush()
        assert recorder.stats().refused == 0
        await mend(database)
        await recorder.flush()
    assert await stored_ids(database) == ["a", "b", "c", "odd"]
    assert await num_billed(database) == 4


async def test_a_row_whose_values_are_refused_is_quarantined_though_it_is_the_only_one(
    database: Database, tmp_path: Path, break_inserts: Break
) -> None:
    await break_inserts(request_id="odd")
    async with recording(database, tmp_path / "journal", interval_s=60.0) as recorder:
        recorder.record(make_row("odd"))
        await recorder.flush()
        assert recorder.stats().refused == 1
    report = QuarantinedUsage(tmp_path / "journal").report()
    assert (report.rows, report.unreadable_lines) == (1, 0)
    assert [(row.request_id, row.tenant_id) for row in report.shown] == [("odd", "ten_a")]
    assert await num_billed(database) == 0


async def test_quarantined_rows_are_restored_once_however_often_it_is_asked(
    database: Database, database_url: str, tmp_path: Path, break_inserts: Break
) -> None:
    settings = GatewaySettings(data_dir=tmp_path, database_url=database_url)
    folder = settings.usage_journal_dir
    await break_inserts(request_id="odd")
    async with recording(database, folder, interval_s=60.0) as recorder:
        for request_id in ("odd", "fine"):
            recorder.record(make_row(request_id))
        await recorder.flush()
    assert await restore_rows(settings) == (0, 1), "which is still refused, and so remains"
    assert QuarantinedUsage(folder).report().rows == 1
    await mend(database)
    QuarantinedUsage(folder).add_damaged([b'{"request_id":"torn'])
    QuarantinedUsage(folder).add_row(make_row("fine"))
    assert await restore_rows(settings) == (2, 1)
    assert await restore_rows(settings) == (0, 1)
    assert await stored_ids(database) == ["fine", "odd"]
    assert await num_billed(database) == 2
    assert QuarantinedUsage(folder).report() == QuarantinedUsageReport(0, 1, [])


async def test_a_restore_that_the_database_ends_loses_nothing(tmp_path: Path) -> None:
    aside = QuarantinedUsage(tmp_path)
    for request_id in ("a", "b", "c"):
        aside.add_row(make_row(request_id))
    stored = []

    async def store(row: object) -> bool:
        stored.append(row)
        if len(stored) == 2:
            raise Unavailable("away", code="store_unavailable")
        return True

    with pytest.raises(Unavailable):
        await aside.restore(store)
    assert aside.report().rows == 3
    aside.add_row(make_row("d"))

    async def take(_row: object) -> bool:
        return True

    assert await aside.restore(take) == (4, 0)
    assert aside.report().total == 0
    assert {path.name for path in tmp_path.iterdir()} == {"quarantine.lock"}  # noqa: ASYNC240


async def test_the_reconciliation_counts_quarantined_usage_and_does_not_agree_then(
    database: Database, demo: Demo, clock: ManualClock, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    aside = QuarantinedUsage(tmp_path / "usage-journal")
    classes, prices = ClassCache(database, clock), RequestRulesCache(database, clock)
    quotas = QuotaEnforcer(database, LeaseStore("replica", 20.0), clock)
    authenticator = Authenticator(database, PEPPER, clock)
    router = admin_router(database, authenticator, classes, prices, quotas, PEPPER, clock, quarantined_usage=aside)
    admin = Admin(Litestar([router], logging_config=None), demo.admin_key)
    async with admin.http:
        found = await admin.call("GET", "usage/reconciliation", 200)
        assert found["agrees"]
        assert found["quarantined_usage"] == {"rows": 0, "unreadable_lines": 0, "shown": []}
        await asyncio.to_thread(aside.add_row, make_row("r-aside", started_at=clock.now() - timedelta(days=400)))
        await asyncio.to_thread(aside.add_damaged, [b"torn"])
        found = await admin.call("GET", "usage/reconciliation", 200)
    assert not found["agrees"]
    assert (found["quarantined_usage"]["rows"], found["quarantined_usage"]["unreadable_lines"]) == (1, 1)
    show_reconciliation(found)
    said = capsys.readouterr().out
    assert "1 quarantined rows, and 1 unreadable lines" in said
    assert "moiety usage restore" in said
    assert "r-aside" in said
