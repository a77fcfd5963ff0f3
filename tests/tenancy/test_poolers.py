"""PostgreSQL behind pgbouncer in transaction mode: nothing depends on session state."""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import shutil
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from structlog.testing import capture_logs
from tests.conftest import free_port
from tests.usage_rows import make_row

from moiety_migrations import upgrade
from moiety_migrations.errors import DatabaseUnreachable
from moiety_migrations.revisions import HEAD
from moiety_platform.clock import ManualClock
from moiety_platform.db.readiness import StoreReadiness
from moiety_platform.db.session import Database
from moiety_platform.errors import Unavailable
from moiety_platform.tenants.models import Tenant
from moiety_platform.tenants.schemas import NewTenant
from moiety_platform.tenants.service import create_tenant
from moiety_platform.usage.models import LedgerEntry
from moiety_platform.usage.recorder import UsageRecorder

from .conftest import Wire
from .test_recorder import stored_ids

PGBOUNCER = shutil.which("pgbouncer", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
SERVER_CONNECTIONS = 3
POLL_S = 0.05

pytestmark = pytest.mark.skipif(PGBOUNCER is None, reason="pgbouncer is not installed")

StartPooler = Callable[..., Awaitable[str]]


def run_pooler(arguments: list[str], log: Path) -> subprocess.Popen[bytes]:
    assert PGBOUNCER is not None
    with log.open("wb") as output:
        return subprocess.Popen([PGBOUNCER, *arguments], stdout=output, stderr=output)


@pytest.fixture
async def start_pooler(tmp_path: Path) -> AsyncIterator[StartPooler]:
    """Starts a pgbouncer before a database; returns its URL. It reaches the server over a relay, for it runs as a user
    who may not enter the server's folder."""
    wires: list[Wire] = []
    poolers: list[subprocess.Popen[bytes]] = []

    async def start(url: str, pool_mode: str = "transaction") -> str:
        location, _, folder = url.partition("?host=")
        wire = Wire(f"{folder}/.s.PGSQL.5432")
        await wire.mend()
        wires.append(wire)
        port, database = free_port(), location.rsplit("/", 1)[1]
        config = tmp_path / f"pgbouncer-{port}.ini"
        config.write_text(
            f"[databases]\nbehind = host=127.0.0.1 port={wire.port} dbname={database} user=postgres\n"
            f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
            f"pool_mode = {pool_mode}\ndefault_pool_size = {SERVER_CONNECTIONS}\nserver_round_robin = 1\n"
        )
        as_nobody = ["-u", "nobody"] if getpass.getuser() == "root" else []
        poolers.append(run_pooler([*as_nobody, str(config)], tmp_path / "pgbouncer.log"))
        for _ in range(200):
            with contextlib.suppress(OSError):
                _, writer = await asyncio.open_connection("127.0.0.1", port)
                writer.close()
                await writer.wait_closed()
                return f"postgresql://moiety@127.0.0.1:{port}/behind"
            assert poolers[-1].poll() is None, (tmp_path / "pgbouncer.log").read_text()
            await asyncio.sleep(POLL_S)
        raise AssertionError("pgbouncer does not listen")

    yield start
    for pooler in poolers:
        pooler.kill()
        pooler.wait()
    for wire in wires:
        await wire.cut()


async def test_everything_works_behind_a_pooler_that_gives_each_transaction_another_server_connection(
    clean_postgres: str, start_pooler: StartPooler, clock: ManualClock
) -> None:
    url = await start_pooler(clean_postgres)
    first, second = Database.open(url), Database.open(url)

    async def add(database: Database, number: int) -> None:
        async with database.write() as session:
            await create_tenant(session, NewTenant(name=f"tenant {number}"), clock.now())
        async with database.read() as session:
            found = await session.scalars(sa.select(Tenant.name).where(Tenant.name == f"tenant {number}"))
            assert found.all() == [f"tenant {number}"]

    with capture_logs() as said:
        for start in range(0, 200, 20):
            batch = range(start, start + 20)
            await asyncio.gather(*(add(first if number % 2 else second, number) for number in batch))
    async with first.read() as session:
        assert await session.scalar(sa.select(sa.func.count()).select_from(Tenant)) == 200
    assert [line["event"] for line in said] == ["database_behind_pooler"] * 2
    await first.close()
    await second.close()


async def test_two_hundred_usage_rows_are_stored_through_a_pooler_and_none_is_quarantined(
    clean_postgres: str, start_pooler: StartPooler, tmp_path: Path
) -> None:
    url = await start_pooler(clean_postgres)
    databases = [Database.open(url) for _ in range(2)]
    recorders = [UsageRecorder(database, tmp_path / f"journal-{i}") for i, database in enumerate(databases)]
    for recorder in recorders:
        await recorder.start()
    for number in range(200):
        recorders[number % 2].record(make_row(f"r{number:03}"))
        if number % 5 == 0:
            await asyncio.gather(*(recorder.flush() for recorder in recorders))
    for recorder in recorders:
        await recorder.stop()
        assert recorder.stats().refused == 0
    assert len(await stored_ids(databases[0])) == 200
    async with databases[0].read() as session:
        assert await session.scalar(sa.select(sa.func.count()).select_from(LedgerEntry)) == 200
    for database in databases:
        await database.close()


async def test_a_pooler_leaves_no_prepared_statement_and_no_setting_on_the_server_connections(
    clean_postgres: str, start_pooler: StartPooler
) -> None:
    url = await start_pooler(clean_postgres)
    database = Database.open(url)
    for _ in range(10):
        await database.ping()
    for _ in range(SERVER_CONNECTIONS):
        async with database.read() as session:
            assert (await session.scalars(sa.text("SELECT name FROM pg_prepared_statements"))).all() == []
    await database.close()


async def test_a_direct_connection_keeps_its_prepared_statements(clean_postgres: str) -> None:
    database = Database.open(clean_postgres)
    with capture_logs() as said:
        for _ in range(2):
            await database.ping()
    async with database.read() as session:
        assert len((await session.scalars(sa.text("SELECT name FROM pg_prepared_statements"))).all()) > 0
    assert said == []
    await database.close()


def leave_prepared_statements(url: str) -> None:
    """Leave prepared statements on each server connection, under the names that drivers choose."""
    with contextlib.closing(psycopg.connect(url, autocommit=True)) as other:
        for _ in range(SERVER_CONNECTIONS):
            for name in ("_pg3_0", "_pg3_1", "__asyncpg_stmt_1__"):
                with contextlib.suppress(psycopg.errors.DuplicatePreparedStatement):
                    other.execute(f"PREPARE {name} AS SELECT 1")


async def test_migrations_run_through_a_pooler_whose_server_connections_have_statements_of_others(
    new_postgres: Callable[[str], str], start_pooler: StartPooler
) -> None:
    direct = new_postgres("behind_pooler")
    url = await start_pooler(direct)
    await asyncio.to_thread(leave_prepared_statements, url)
    assert await asyncio.to_thread(upgrade, url) == HEAD
    database = Database.open(url)
    readiness = StoreReadiness(database)
    async with asyncio.timeout(60):
        while (reason := await readiness.why_not_ready()) == readiness.silence:  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0.1)
    assert reason == ""
    await database.close()


async def test_a_startup_parameter_that_a_pooler_refuses_is_named_with_what_to_do(
    clean_postgres: str, start_pooler: StartPooler
) -> None:
    url = await start_pooler(clean_postgres) + "?options=-csearch_path%3Dpublic"
    database = Database.open(url)
    with pytest.raises(Unavailable) as caught:
        await database.ping()
    assert "unsupported startup parameter: options" in str(caught.value.__cause__)
    assert "ignore_startup_parameters" in str(caught.value.__cause__)
    assert "unsupported startup parameter: options" in await StoreReadiness(database).why_not_ready()
    with pytest.raises(DatabaseUnreachable, match="unsupported startup parameter: options"):
        await asyncio.to_thread(upgrade, url)
    await database.close()


async def test_a_name_of_the_application_goes_through_a_pooler(clean_postgres: str, start_pooler: StartPooler) -> None:
    database = Database.open(await start_pooler(clean_postgres) + "?application_name=gateway&connect_timeout=9")
    async with database.read() as session:
        assert await session.scalar(sa.text("SELECT current_setting('application_name')")) == "gateway"
    await database.close()


async def test_a_pooler_that_allows_no_transactions_is_refused_with_what_to_set(
    clean_postgres: str, start_pooler: StartPooler
) -> None:
    database = Database.open(await start_pooler(clean_postgres, "statement"))
    assert "set the pooler's pool_mode to transaction or session" in await StoreReadiness(database).why_not_ready()
    await database.close()
