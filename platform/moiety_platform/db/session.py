"""Engines and transactions. A `Database` is owned by the entry point that opens it, and closed there.

Reads and writes use different methods, because SQLite must know beforehand: a transaction that will write takes the
write lock with its first statement (BEGIN IMMEDIATE), so it waits for the lock instead of failing half-way. The block
of a transaction uses the store and does nothing else; any time-out or broken connection in it counts as an unavailable
store.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import functools
import sqlite3
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self

import structlog
from sqlalchemy import Connection, event, text
from sqlalchemy.engine.interfaces import DBAPIConnection
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import ORMExecuteState
from sqlalchemy.orm.interfaces import ORMOption
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

from moiety_platform.db.connecting import POLL_S, OpenConnections, connect_uncancelled
from moiety_platform.db.failures import unavailable_if_unreachable
from moiety_platform.db.idle_connections import check_idle_connections
from moiety_platform.db.postgres_url import PostgresUrl
from moiety_platform.db.url import postgres_url, sqlite_path
from moiety_platform.thread_priority import lower_priority

SQLITE_BUSY_TIMEOUT_S = 5.0
CONNECT_TIMEOUT_S = 5.0
STATEMENT_TIMEOUT_S = 15.0
CLOSE_TIMEOUT_S = 1.0  # beyond the time in which a connection that is being opened is there or fails
IN_USE_TIMEOUT_S = 1.0
SQLITE_CACHE_KIB = 512  # page cache of a connection; the operating system caches the rest
SQLITE_STATEMENTS = 32  # prepared statements per connection; statements over many rows are large

UNRESTRICTED = {"moiety_unrestricted": True}  # execution options of a statement that a restriction does not apply to

_log = structlog.get_logger(__name__)

_BEGIN_OPTION = "moiety_sqlite_begin"


@dataclass(frozen=True, slots=True)
class Pool:
    """Limits of the transactions of one engine.

    `size` is the number of concurrent transactions; another one waits up to `wait_s` for a connection, also for a new
    one. `statement_timeout_s` is of PostgreSQL.
    """

    size: int
    sqlite_size: int  # SQLite has one writer at a time, and each connection has a thread
    wait_s: float
    statement_timeout_s: float = STATEMENT_TIMEOUT_S


SERVING = Pool(10, 5, CONNECT_TIMEOUT_S)
CHECKING = Pool(5, 5, CONNECT_TIMEOUT_S)  # look-ups of API keys, which must not wait for other work
MAINTENANCE = Pool(1, 1, CONNECT_TIMEOUT_S, 24 * 3600.0)  # of commands that read or write whole tables
REPORTING = Pool(4, 3, 8.0)  # separate from requests: reports wait longer, and take no connection of a request


def create_engine(
    url: str, opened: OpenConnections, *, busy_timeout_s: float = SQLITE_BUSY_TIMEOUT_S, pool: Pool = SERVING
) -> AsyncEngine:
    """Return an engine that connects at first use.

    `url` may be plain (`sqlite:///f.db`, `postgresql://…`) or name its async driver. `busy_timeout_s` is how long a
    SQLite writer waits for another. `opened` tracks the engine's connections. Raises BadDatabaseUrl.
    """
    path = sqlite_path(url)
    if path is None:
        return _create_postgres_engine(postgres_url(url), opened, pool)
    engine = create_async_engine(
        f"sqlite+aiosqlite:///{path}",
        pool_size=pool.sqlite_size,
        max_overflow=0,
        pool_timeout=pool.wait_s,
        pool_use_lifo=True,  # the prepared statements and pages of one connection serve most of the load
        hide_parameters=True,  # tracebacks and logs must not contain hashes of keys
        connect_args={
            "cached_statements": SQLITE_STATEMENTS,
            "timeout": busy_timeout_s,
            "factory": functools.partial(_SqliteConnection, opened),
        },
    )
    connect_uncancelled(engine, opened)
    event.listen(engine.sync_engine, "connect", _prepare_sqlite)
    event.listen(engine.sync_engine, "begin", _begin_sqlite)
    return engine


def _create_postgres_engine(url: PostgresUrl, opened: OpenConnections, pool: Pool) -> AsyncEngine:
    from moiety_platform.db.postgres import PostgresConnector  # noqa: PLC0415  imports the driver, which is slow

    engine = create_async_engine(
        "postgresql+asyncpg://",
        pool_size=pool.size,
        max_overflow=0,
        pool_timeout=pool.wait_s,
        pool_use_lifo=True,  # as of SQLite
        hide_parameters=True,
    )
    connector = PostgresConnector(
        url, opened, connect_timeout_s=pool.wait_s, statement_timeout_s=pool.statement_timeout_s
    )
    connect_uncancelled(engine, opened, connector.connect)
    check_idle_connections(engine)
    return engine


class Database:
    """The store of one process: read and write transactions, and closing."""

    def __init__(
        self, engine: AsyncEngine, opened: OpenConnections, connect_timeout_s: float = CONNECT_TIMEOUT_S
    ) -> None:
        self.engine, self.opened = engine, opened
        self.close_timeout_s = connect_timeout_s + CLOSE_TIMEOUT_S
        self.num_statements = 0  # sent so far, including those that open transactions
        event.listen(engine.sync_engine, "before_cursor_execute", self._count)
        self._read = async_sessionmaker(engine, expire_on_commit=False, autoflush=False)
        alone = engine.execution_options(isolation_level="AUTOCOMMIT")
        self._read_alone = async_sessionmaker(alone, expire_on_commit=False, autoflush=False)
        writer = engine.execution_options(**{_BEGIN_OPTION: "BEGIN IMMEDIATE"})
        self._write = async_sessionmaker(writer, expire_on_commit=False)
        self._criteria: tuple[ORMOption, ...] = ()

    def _count(self, *_: object) -> None:
        self.num_statements += 1

    @classmethod
    def open(cls, url: str, *, busy_timeout_s: float = SQLITE_BUSY_TIMEOUT_S, pool: Pool = SERVING) -> Self:
        """Return the database of a URL, without connecting. Raises BadDatabaseUrl."""
        opened = OpenConnections()
        engine = create_engine(url, opened, busy_timeout_s=busy_timeout_s, pool=pool)
        return cls(engine, opened, max(busy_timeout_s, pool.wait_s))

    def restricted(self, criteria: Sequence[ORMOption]) -> Self:
        """Return the same store restricted to the rows that meet the criteria (of `with_loader_criteria`).

        Other rows are not found, counted, changed or deleted. Inserts are not checked.
        """
        narrow = copy.copy(self)
        narrow._criteria = (*self._criteria, *criteria)
        return narrow

    @property
    def dialect(self) -> str:
        """Name of the dialect: `sqlite` or `postgresql`."""
        return self.engine.dialect.name

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that only reads. Raises Unavailable when the store is away."""
        with unavailable_if_unreachable():
            async with self._read() as session:
                self._restrict(session)
                yield session

    @asynccontextmanager
    async def read_statements(self) -> AsyncIterator[AsyncSession]:
        """Open a session for statements that read and need not see the same state.

        It has no transaction where PostgreSQL is reached directly, since beginning and ending one take two messages in
        each direction. A pooler could send the messages of a statement without a transaction to different servers.
        Raises Unavailable when the store is away.
        """
        if self.opened.are_direct:
            with unavailable_if_unreachable():
                async with self._read_alone() as session:
                    await session.connection()  # can be a new one, which is found to be a pooler's
                    if self.opened.are_direct:
                        self._restrict(session)
                        yield session
                        return
        async with self.read() as session:
            yield session

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncSession]:
        """Open a transaction that commits when the block ends normally and rolls back when it raises.

        Raises Unavailable when the store is away.
        """
        with unavailable_if_unreachable():
            async with self._write.begin() as session:
                self._restrict(session)
                yield session

    def _restrict(self, session: AsyncSession) -> None:
        if self._criteria:
            event.listen(session.sync_session, "do_orm_execute", self._add_criteria)

    def _add_criteria(self, state: ORMExecuteState) -> None:
        reads_or_changes = state.is_select or state.is_update or state.is_delete
        if reads_or_changes and not state.execution_options.keys() & UNRESTRICTED.keys():
            state.statement = state.statement.options(*self._criteria)

    async def ping(self) -> None:
        """Raise Unavailable unless the store answers."""
        async with self.read() as session:
            await session.execute(text("SELECT 1"))

    async def close(self) -> None:
        """Close every connection, and wait up to `close_timeout_s` until those of cancelled callers are closed too.

        Connections in use get `IN_USE_TIMEOUT_S` first: one that is returned after that lies in a pool that nobody
        closes.
        """
        loop, pool = asyncio.get_running_loop(), self.engine.pool
        deadline = loop.time() + IN_USE_TIMEOUT_S
        while isinstance(pool, QueuePool) and pool.checkedout() and loop.time() < deadline:  # noqa: ASYNC110  no event
            await asyncio.sleep(POLL_S)
        await self.engine.dispose()
        if not await self.opened.wait_closed(self.close_timeout_s):
            _log.warning(
                "database_connections_left_open",
                timeout_s=self.close_timeout_s,
                advice="check the database for statements that do not end",
            )


class _SqliteConnection(sqlite3.Connection):
    """SQLite connection that ends its transaction and closes its file on close; a cancelled task closes it at once.

    SQLite by default keeps transaction, lock and descriptors as long as anything, such as the task's error, refers to
    one of the cursors.

    The driver makes each connection in a separate thread.
    """

    def __init__(self, opened: OpenConnections, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        opened.add_thread()
        self._cursors: weakref.WeakSet[sqlite3.Cursor] = weakref.WeakSet()
        lower_priority()

    def cursor(self, *args: Any) -> sqlite3.Cursor:  # type: ignore[override]  # the driver offers no factory
        cursor: sqlite3.Cursor = super().cursor(*args)
        self._cursors.add(cursor)
        return cursor

    def close(self) -> None:
        with contextlib.suppress(sqlite3.Error):  # close also if the rollback fails
            self.rollback()
        for cursor in list(self._cursors):
            with contextlib.suppress(sqlite3.Error):
                cursor.close()
        super().close()


def _prepare_sqlite(connection: DBAPIConnection, _entry: ConnectionPoolEntry) -> None:
    raw: Any = connection
    raw.isolation_level = None  # the driver opens no transactions of its own; `_begin_sqlite` does
    cursor = connection.cursor()
    for pragma in ("journal_mode=WAL", "synchronous=NORMAL", "foreign_keys=ON", f"cache_size=-{SQLITE_CACHE_KIB}"):
        cursor.execute(f"PRAGMA {pragma}")
    cursor.close()


def _begin_sqlite(connection: Connection) -> None:
    connection.exec_driver_sql(connection.get_execution_options().get(_BEGIN_OPTION, "BEGIN"))
