"""Foundations of the store: URLs, transactions, timestamps, pages, and the distinction of outages from errors."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy as sa
from hypothesis import given
from hypothesis import strategies as st

from moiety_platform.clock import ManualClock
from moiety_platform.db.failures import is_unreachable
from moiety_platform.db.paging import PageRequest, Position, cut_page, decode_cursor, encode_cursor
from moiety_platform.db.session import Database
from moiety_platform.db.url import redact, sqlite_path, to_libpq_url, to_sync_url
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import BadRequest, Unavailable
from moiety_platform.tenants.models import Project, Tenant
from moiety_platform.tenants.schemas import NewTenant
from moiety_platform.tenants.service import create_tenant

from .conftest import CuttableStore, Demo

moments = st.datetimes(min_value=datetime(1970, 1, 1), max_value=datetime(9999, 12, 30), timezones=st.just(UTC))


@pytest.mark.parametrize(
    ("given_url", "sync_url"),
    [
        ("sqlite:///a/b.db", "sqlite+pysqlite:///a/b.db"),
        ("sqlite+aiosqlite:////var/m.db", "sqlite+pysqlite:////var/m.db"),
        ("postgresql://u:p@h/d", "postgresql+psycopg://u:p@h/d"),
        ("postgres://h:5/d", "postgresql+psycopg://h:5/d"),
        ("postgresql+asyncpg://u:p%40@h/d?ssl=require", "postgresql+psycopg://u:p%40@h/d?sslmode=require"),
        (
            "postgresql://u@/d?host=/run/pg&sslmode=disable",
            "postgresql+psycopg://u@/d?sslmode=disable&host=/run/pg",
        ),
    ],
)
def test_a_url_as_people_write_it_becomes_the_drivers(given_url: str, sync_url: str) -> None:
    assert to_sync_url(given_url) == sync_url
    assert to_sync_url(sync_url) == sync_url
    if sqlite_path(given_url) is None:
        assert to_libpq_url(given_url) == sync_url.replace("+psycopg", "")


@pytest.mark.parametrize(
    "url",
    [
        "",
        "moiety.db",
        "mysql://h/d",
        "sqlite://",
        "sqlite:///",
        "sqlite://file.db",
        "sqlite:///:memory:",
        "sqlite:///a?b=c",
    ],
)
def test_a_url_that_cannot_work_is_refused_with_one_that_would(url: str) -> None:
    for use in (to_sync_url, Database.open):
        with pytest.raises(BadDatabaseUrl, match=r"give sqlite:///path/to/file\.db or postgresql://"):
            use(url)


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://u:s3cret@h/d",
        "postgresql://u:pa@s3cret@h/d",
        "postgresql://u:pa/s3cret@h/d",
        "postgresql://u:pa?s3cret#x@h/d",
        "mysql://u:s3cret/s3cret@h/d",
        "postgresql://h/d?user=u&password=s3cret",
        "postgresql://h/d?sslpassword=s3cret",
    ],
)
def test_a_password_is_not_shown(url: str) -> None:
    assert "s3cret" not in redact(url)


@given(moments, st.text(st.characters(categories=["L", "N"]), min_size=1, max_size=60))
def test_a_cursor_says_the_position_that_it_was_made_of(at: datetime, row_id: str) -> None:
    assert decode_cursor(encode_cursor(Position(at, row_id))) == Position(at, row_id)


@given(st.one_of(st.text(max_size=60), st.text("AZaz09-_=", max_size=600)))
def test_any_other_cursor_is_a_bad_request(text: str) -> None:
    try:
        position = decode_cursor(text)
    except BadRequest as refused:
        assert refused.param == "cursor"
    else:
        assert decode_cursor(encode_cursor(position)) == position


@given(st.lists(st.tuples(moments, st.text("ab", min_size=1, max_size=4)), unique=True, max_size=20), st.integers(1, 6))
def test_pages_together_are_the_whole_list(rows: list[tuple[datetime, str]], limit: int) -> None:
    rows.sort()
    seen: list[tuple[datetime, str]] = []
    after: Position | None = None
    while True:
        rest = [row for row in rows if after is None or row > (after.at, after.row_id)]
        page, cursor = cut_page(rest[: limit + 1], PageRequest(limit), lambda row: Position(*row))
        seen += page
        if cursor is None:
            break
        after = decode_cursor(cursor)
    assert seen == rows


async def test_points_in_time_come_back_aware_in_utc_and_to_the_microsecond(database: Database) -> None:
    moment = datetime(2026, 7, 1, 3, 4, 5, 678901, tzinfo=timezone(timedelta(hours=5, minutes=30)))
    async with database.write() as session:
        tenant = await create_tenant(session, NewTenant(name="t"), moment)
    async with database.read() as session:
        found = await session.get_one(Tenant, tenant.id)
        same = await session.scalar(sa.select(Tenant.id).where(Tenant.created_at == moment))
    assert found.created_at == moment
    assert found.created_at.utcoffset() == timedelta(0)
    assert same == tenant.id


async def test_a_naive_point_in_time_is_a_mistake(database: Database) -> None:
    with pytest.raises(sa.exc.StatementError, match="must be aware"):
        async with database.write() as session:
            await create_tenant(session, NewTenant(name="t"), datetime(2026, 1, 1))


async def test_a_block_that_raises_leaves_nothing_behind(database: Database, clock: ManualClock) -> None:
    with pytest.raises(RuntimeError, match="second thoughts"):
        async with database.write() as session:
            await create_tenant(session, NewTenant(name="t"), clock.now())
            raise RuntimeError("second thoughts")
    async with database.read() as session:
        assert (await session.scalars(sa.select(Tenant))).all() == []


async def test_a_project_of_no_tenant_is_refused_by_the_database_itself(database: Database, clock: ManualClock) -> None:
    with pytest.raises(sa.exc.IntegrityError):
        async with database.write() as session:
            session.add(Project(id="p", tenant_id="nobody", name="p", created_at=clock.now()))


async def test_writers_that_read_first_wait_for_each_other_and_lose_nothing(database: Database, demo: Demo) -> None:
    async def add_one() -> None:
        async with database.write() as session:
            tenant = await session.get_one(Tenant, demo.tenant_id, with_for_update=True)
            await asyncio.sleep(0)
            tenant.weight += 1

    await asyncio.gather(*(add_one() for _ in range(20)))
    async with database.read() as session:
        assert (await session.get_one(Tenant, demo.tenant_id)).weight == 22.0


BUSY = {
    "sqlite": "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 60000) SELECT max(i) FROM n",
    "postgresql": "SELECT pg_sleep(0.03)",
}


async def test_a_transaction_of_a_cancelled_task_is_over_at_once_whoever_keeps_its_error(
    database: Database, database_url: str, demo: Demo
) -> None:
    change = sa.update(Tenant).where(Tenant.id == demo.tenant_id)

    async def be_long() -> None:
        async with database.write() as session:
            for number in range(100):
                await session.execute(change.values(name=f"lost {number}").returning(Tenant.id))
                await session.execute(sa.text(BUSY[database.dialect]))

    other = Database.open(database_url, busy_timeout_s=60)
    kept: list[Any] = []  # an error refers to all that ran when it was raised
    for number in range(20):
        task = asyncio.create_task(be_long())
        await asyncio.wait({task}, timeout=0.02 + 0.005 * number)
        task.cancel()
        kept += await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(50), other.write() as session:
            await session.execute(change.values(name=f"won {number}"))
    assert {type(error) for error in kept} == {asyncio.CancelledError}
    async with other.read() as session:
        assert (await session.scalars(sa.select(Tenant.name))).all() == ["won 19"]
    await other.close()


async def test_sqlite_runs_with_a_write_ahead_log_and_its_readers_do_not_wait_for_a_writer(
    migrated_sqlite: Path, tmp_path: Path, clock: ManualClock
) -> None:
    path = tmp_path / "m.db"
    path.write_bytes(migrated_sqlite.read_bytes())  # noqa: ASYNC240
    database = Database.open(f"sqlite:///{path}", busy_timeout_s=0.01)
    async with database.write() as writing:
        await create_tenant(writing, NewTenant(name="t"), clock.now())
        async with database.read() as reading:
            assert await reading.scalar(sa.text("PRAGMA journal_mode")) == "wal"
            assert (await reading.scalars(sa.select(Tenant))).all() == []
        with pytest.raises(Unavailable):
            async with database.write() as other:
                await create_tenant(other, NewTenant(name="u"), clock.now())
    await database.close()


async def test_a_store_that_is_away_is_unavailable_and_one_that_is_back_is_not(cuttable: CuttableStore) -> None:
    await cuttable.database.ping()
    await cuttable.wire.cut()
    with pytest.raises(Unavailable) as caught:
        await cuttable.database.ping()
    assert caught.value.code == "store_unavailable"
    assert caught.value.retry_after_s is not None
    await cuttable.wire.mend()
    await cuttable.database.ping()


async def test_a_connection_lost_in_mid_transaction_is_an_outage(cuttable: CuttableStore, clock: ManualClock) -> None:
    with pytest.raises(Unavailable):
        async with cuttable.database.write() as session:
            await create_tenant(session, NewTenant(name="t"), clock.now())
            await cuttable.wire.cut()
    async with cuttable.steady.read() as session:
        assert (await session.scalars(sa.select(Tenant))).all() == []


async def test_a_wrong_statement_is_no_outage(database: Database) -> None:
    async def send(statement: str) -> BaseException:
        async with database.engine.connect() as connection:
            with pytest.raises(sa.exc.DBAPIError) as caught:
                await connection.execute(sa.text(statement))
        return caught.value

    nameless = "INSERT INTO tenants VALUES ('t', NULL, 's', 1.0, 'active', '2026-01-01', 'off', NULL)"
    assert not is_unreachable(await send(nameless))
    if database.dialect == "postgresql":
        assert not is_unreachable(await send("SELEKT 1"))
        assert not is_unreachable(await send("SELECT 1 / 0"))


async def test_a_store_that_nobody_migrated_is_unavailable_rather_than_a_defect(empty_url: str) -> None:
    database = Database.open(empty_url)
    with pytest.raises(Unavailable):
        async with database.read() as session:
            await session.execute(sa.select(Tenant))
    await database.close()
