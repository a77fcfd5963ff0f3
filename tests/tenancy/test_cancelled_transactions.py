"""A cancelled transaction returns its connection and leaves nothing open."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psycopg
import pytest
from sqlalchemy import AsyncAdaptedQueuePool, text

from moiety_platform.db.connecting import OpenConnections
from moiety_platform.db.session import CHECKING, REPORTING, SERVING, Database, Pool
from moiety_platform.errors import Unavailable

MAX_TURNS = 120  # of the event loop, in which a transaction is over by far
WAIT_S = 30.0
SMALL = Pool(3, 3, WAIT_S)


@pytest.fixture
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, so that resources must be closed explicitly."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def checked_out(database: Database) -> int:
    pool = database.engine.pool
    assert isinstance(pool, AsyncAdaptedQueuePool)
    return pool.checkedout()


def num_descriptors(path: Path) -> int:
    """Return the number of this process's descriptors of a database's files."""
    links = []
    for one in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            links.append(one.readlink())
    return sum(link.name.startswith(path.name) and link.parent == path.parent for link in links)


async def transact(database: Database, *, write: bool) -> None:
    async with database.write() if write else database.read() as session:
        await session.execute(text("SELECT count(*) FROM api_keys"))
        await session.execute(text("SELECT count(*) FROM tenants"))


async def cancel_after(database: Database, turns: int, *, write: bool) -> None:
    task = asyncio.create_task(transact(database, write=write))
    for _ in range(turns):
        await asyncio.sleep(0)
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError, Unavailable):
        await task


async def eventually(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("turns", [1, 3, 6, 12, 30])
def test_closing_waits_for_the_connections_of_cancelled_callers(
    database_url: str, dialect: str, tmp_path: Path, turns: int
) -> None:
    """Nothing of a closed database reports to the event loop, which ends right after it."""
    threads = set(threading.enumerate())

    async def cancel_and_close() -> set[asyncio.Task[None]]:
        database = Database.open(database_url, pool=SMALL)
        tasks = [asyncio.create_task(transact(database, write=False)) for _ in range(3)]
        for _ in range(turns):
            await asyncio.sleep(0)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await database.close()
        return asyncio.all_tasks() - {asyncio.current_task()}

    assert asyncio.run(cancel_and_close()) == set()
    assert set(threading.enumerate()) <= threads
    if dialect == "sqlite":
        assert num_descriptors(tmp_path / "moiety.db") == 0


async def test_closing_gives_up_on_a_thread_that_does_not_end() -> None:
    opened, end = OpenConnections(), threading.Event()

    def work() -> None:
        opened.add_thread()
        is_added.set()
        end.wait()

    is_added, thread = threading.Event(), threading.Thread(target=work)
    thread.start()
    is_added.wait()
    assert not await opened.wait_closed(0.02)
    end.set()
    assert await opened.wait_closed(WAIT_S)
    thread.join()


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.usefixtures("no_garbage_collection")
async def test_connections_come_back_whenever_a_transaction_is_cancelled(
    database_url: str, dialect: str, tmp_path: Path, write: bool
) -> None:
    database = Database.open(database_url, pool=SMALL)
    try:
        for turns in range(MAX_TURNS):
            await cancel_after(database, turns, write=write)
        for _ in range(10):  # many at once, of which some wait for the pool
            await asyncio.gather(*(cancel_after(database, turns, write=write) for turns in range(0, 60, 2)))
        assert checked_out(database) == 0
        await transact(database, write=write)
    finally:
        await database.close()
    if dialect == "sqlite":
        await eventually(lambda: num_descriptors(tmp_path / "moiety.db") == 0)
    else:
        with contextlib.closing(psycopg.connect(database_url, autocommit=True)) as watcher:
            others = (
                "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
            await eventually(lambda: watcher.execute(others).fetchone() == (0,))


class AskedConnections(OpenConnections):
    """Connections that note how long a close waits for them."""

    def __init__(self) -> None:
        super().__init__()
        self.waited_s: list[float] = []

    async def wait_closed(self, timeout_s: float) -> bool:
        self.waited_s.append(timeout_s)
        return await super().wait_closed(timeout_s)


@pytest.mark.parametrize("pool", [SERVING, CHECKING, REPORTING, Pool(1, 1, 30.0)])
async def test_closing_waits_longer_than_opening_a_connection_may_take(tmp_path: Path, pool: Pool) -> None:
    database = Database.open(f"sqlite:///{tmp_path / 'a.db'}", pool=pool)
    database.opened = asked = AskedConnections()
    await database.close()
    assert [one > pool.wait_s for one in asked.waited_s] == [True]
