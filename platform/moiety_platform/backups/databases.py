"""Copies of a database: SQLite by its online backup, PostgreSQL by COPY in one transaction.

COPY needs no program beside the gateway, while pg_dump must be installed and no older than the server. One transaction
with the isolation REPEATABLE READ gives all tables of one moment, also through a pooler. Both methods read while
gateways write.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Table, column, delete, func, inspect, literal, select, table
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.backups.archive import TABLES, TableCopy
from moiety_platform.backups.errors import BackupError
from moiety_platform.db.base import Base
from moiety_platform.db.session import MAINTENANCE, Database
from moiety_platform.db.tables import load_tables

SQLITE_TIMEOUT_S = 30.0
LEFT_OUT = ("traces", "spans")  # observations of a few days
SQLITE_BESIDE = ("-wal", "-shm")  # suffixes of the files beside a database


def backed_up_tables() -> list[Table]:
    """Return the tables of a backup; each follows those that it refers to."""
    load_tables()
    return [one for one in Base.metadata.sorted_tables if one.name not in LEFT_OUT]


def copy_sqlite(source: Path, target: Path) -> None:
    """Copy a SQLite database, as of one moment, while other processes use it. Raises BackupError."""
    try:
        with (
            closing(sqlite3.connect(f"file:{quote(str(source))}?mode=rw", uri=True, timeout=SQLITE_TIMEOUT_S)) as read,
            closing(sqlite3.connect(target)) as written,
        ):
            read.backup(written)  # all pages in one step: a write of another process does not begin it anew
            (told,) = written.execute("PRAGMA integrity_check").fetchone()
    except sqlite3.Error as exc:
        raise BackupError(f"{source} cannot be copied: {exc}; check the file with: moiety doctor") from exc
    if told != "ok":
        raise BackupError(f"{source} is damaged: {told}; restore an earlier backup")
    close_sqlite_file(target)


def close_sqlite_file(path: Path) -> None:
    """Make the file of a database that nobody uses complete by itself, without a write-ahead log beside it."""
    with closing(sqlite3.connect(path, timeout=SQLITE_TIMEOUT_S)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


def replace_sqlite(source: Path, target: Path) -> None:
    """Put a copy of a database in the place of `target`. Raises OSError or BackupError."""
    target.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = target.with_name(f".{target.name}.restoring")
    draft.unlink(missing_ok=True)
    copy_sqlite(source, draft)
    for suffix in SQLITE_BESIDE:
        target.with_name(target.name + suffix).unlink(missing_ok=True)
    draft.replace(target)


async def count_rows(session: AsyncSession, tables: Sequence[Table]) -> list[TableCopy]:
    """Return the tables with their numbers of rows."""
    copies = []
    for one in tables:
        rows = await session.scalar(select(func.count()).select_from(one))
        copies.append(TableCopy(str(one.name), _columns(one), rows or 0))
    return copies


async def dump_tables(session: AsyncSession, folder: Path) -> list[TableCopy]:
    """Write each table of PostgreSQL to a file, in the session's transaction, which has begun. Raises BackupError."""
    driver = await _driver(session)
    (folder / TABLES).mkdir(mode=0o700)
    copies = []
    for one in backed_up_tables():
        columns, path = _columns(one), folder / TABLES / f"{one.name}.copy"
        done = await driver.copy_from_table(
            one.name, columns=columns, output=path, timeout=MAINTENANCE.statement_timeout_s
        )
        copies.append(TableCopy(str(one.name), columns, int(done.rpartition(" ")[2])))
    return copies


async def load_copies(session: AsyncSession, folder: Path, copies: Sequence[TableCopy]) -> None:
    """Replace the rows of the tables of PostgreSQL by those of a backup, in the session's transaction."""
    for one in reversed(copies):  # also what a migration has inserted
        await session.execute(delete(table(one.name)))
    driver = await _driver(session)
    for one in copies:
        path = folder / TABLES / f"{one.name}.copy"
        await driver.copy_to_table(one.name, columns=one.columns, source=path, timeout=MAINTENANCE.statement_timeout_s)
        for name in one.columns:
            sequence = await session.scalar(select(func.pg_get_serial_sequence(one.name, name)))
            if sequence is not None and one.rows:
                largest = select(func.max(column(name))).select_from(table(one.name)).scalar_subquery()
                await session.execute(select(func.setval(sequence, largest)))


async def holds_data(database: Database) -> bool:
    """Return whether the database has tenants or keys. Raises Unavailable."""
    async with database.read() as session:
        existing = await (await session.connection()).run_sync(lambda one: inspect(one).get_table_names())
        for name in sorted({"tenants", "api_keys"} & set(existing)):
            if await session.scalar(select(literal(1)).select_from(table(name)).limit(1)):
                return True
    return False


def _columns(one: Table) -> list[str]:
    return [str(column.name) for column in one.columns]


async def _driver(session: AsyncSession) -> Any:
    """Return the driver's connection of the session, whose transaction has begun."""
    connection = await session.connection()
    return (await connection.get_raw_connection()).driver_connection
