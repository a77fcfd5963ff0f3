"""Connections to PostgreSQL that wait in the pool: broken ones are replaced, and reads alone need no transaction."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from sqlalchemy import event, text

from moiety_platform.db import idle_connections
from moiety_platform.db.session import Database
from moiety_platform.quota.kinds import LimitLevel, Scope
from moiety_platform.quota.limits import load_limits

INSERT = "INSERT INTO quotas (id, level, scope_id, kind, cap, created_at)"
PIDS = "SELECT pg_backend_pid()"
BETWEEN_S = "SELECT extract(epoch FROM statement_timestamp() - now())"  # since the transaction began


@pytest.fixture
def dialect() -> str:
    return "postgresql"


async def pid_of(database: Database) -> int:
    async with database.read_statements() as session:
        return int((await session.execute(text(PIDS))).scalar_one())


def end_all(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database()"
            " AND pid <> pg_backend_pid()"
        )


@pytest.mark.parametrize("test_after_s", [0.0, 3600.0])
async def test_ended_connections_are_replaced_before_their_next_use(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch, test_after_s: float
) -> None:
    monkeypatch.setattr(idle_connections, "TEST_AFTER_S", test_after_s)

    async def read() -> int:
        async with database.read() as session:
            await asyncio.sleep(0.05)
            return int((await session.execute(text(PIDS))).scalar_one())

    before = set(await asyncio.gather(*(read() for _ in range(3))))
    await asyncio.to_thread(end_all, database_url)
    await asyncio.sleep(0.2)
    after = set(await asyncio.gather(*(read() for _ in range(3))))
    assert len(before) == len(after) == 3
    assert not before & after


async def test_only_a_connection_that_was_idle_for_long_is_tested(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    tests = []
    pool_pings = idle_connections._check

    def count(connection: object, record: object, fairy: object) -> None:
        class Pinged:
            driver_connection = connection.driver_connection  # type: ignore[attr-defined]
            dbapi = connection.dbapi  # type: ignore[attr-defined]

            def ping(self) -> None:
                tests.append(self)

        pool_pings(Pinged(), record, fairy)

    event.remove(database.engine.sync_engine, "checkout", pool_pings)
    event.listen(database.engine.sync_engine, "checkout", count)
    for _ in range(3):
        await pid_of(database)
    assert not tests
    monkeypatch.setattr(idle_connections, "TEST_AFTER_S", 0.0)
    await pid_of(database)
    assert len(tests) == 1


async def test_a_read_alone_opens_no_transaction_and_uses_the_last_connection(database: Database) -> None:
    first = await pid_of(database)
    for _ in range(3):
        assert await pid_of(database) == first
    async with database.read_statements() as session:
        await session.execute(text(BETWEEN_S))
        await asyncio.sleep(0.05)
        assert (await session.execute(text(BETWEEN_S))).scalar_one() < 0.04
    async with database.read() as session:
        await session.execute(text(BETWEEN_S))
        await asyncio.sleep(0.05)
        assert (await session.execute(text(BETWEEN_S))).scalar_one() > 0.04


async def test_a_write_after_a_read_alone_is_a_transaction(database: Database) -> None:
    await pid_of(database)
    with pytest.raises(ZeroDivisionError):
        async with database.write() as session:
            await session.execute(
                text("INSERT INTO quotas VALUES ('quo_1', 'tenant', 'ten_1', 'requests_per_minute', 1, now())")
            )
            raise ZeroDivisionError
    async with database.read_statements() as session:
        assert (await session.execute(text("SELECT count(*) FROM quotas"))).scalar_one() == 0


async def test_a_few_rows_of_a_large_table_are_found_by_its_index(database: Database) -> None:
    async with database.write() as session:
        await session.execute(
            text(
                f"{INSERT} SELECT 'quo_' || n, 'tenant', 'ten_' || n, 'requests_per_minute', n, now()"
                " FROM generate_series(1, 15000) AS n"
            )
        )
    async with database.write() as session:
        await session.execute(text("ANALYZE quotas"))
    scans = "SELECT seq_scan FROM pg_stat_xact_user_tables WHERE relname = 'quotas'"
    scopes = [Scope(LimitLevel.TENANT, f"ten_{number}") for number in (7, 9_000, 20_000)]
    async with database.read() as session:
        found = await load_limits(session, scopes)
        seq_scans = (await session.execute(text(scans))).one().seq_scan
    assert [[limit.cap for limit in found[scope]] for scope in scopes] == [[7], [9_000], []]
    assert seq_scans == 0
