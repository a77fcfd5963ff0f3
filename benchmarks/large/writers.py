"""Bulk writes that bypass the product, some million rows in minutes: COPY on PostgreSQL, prepared inserts on SQLite."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import closing
from typing import Any, Protocol

import psycopg
from sqlalchemy.dialects import sqlite as sqlite_dialect

from moiety_platform.db.base import Base, UtcDateTime
from moiety_platform.db.url import sqlite_path, to_libpq_url

CACHE_KIB = 2 * 1024 * 1024


class Writer(Protocol):
    """Bulk writer. Rows are the values of all columns, in the order of the model; JSON is text.

    Migrations add columns to a table in another order than the model's, so every statement names its columns.
    """

    def write(self, model: type[Base], rows: Sequence[tuple[Any, ...]]) -> None: ...

    def finish(self) -> None:
        """Do the maintenance that the database would have done by now."""

    def close(self) -> None: ...


def writer_of(url: str) -> Writer:
    path = sqlite_path(url)
    return PostgresWriter(to_libpq_url(url)) if path is None else SqliteWriter(str(path))


class PostgresWriter:
    def __init__(self, url: str) -> None:
        self._connection = psycopg.connect(url, autocommit=True)

    def write(self, model: type[Base], rows: Sequence[tuple[Any, ...]]) -> None:
        with self._connection.cursor().copy(f"COPY {model.__tablename__} ({names_of(model)}) FROM STDIN") as copy:
            for row in rows:
                copy.write_row(row)

    def finish(self) -> None:
        self._connection.execute("VACUUM ANALYZE")

    def close(self) -> None:
        self._connection.close()


class SqliteWriter:
    def __init__(self, path: str) -> None:
        self._connection = sqlite3.connect(path)
        for pragma in ("synchronous=OFF", f"cache_size=-{CACHE_KIB}"):
            self._connection.execute(f"PRAGMA {pragma}")

    def write(self, model: type[Base], rows: Sequence[tuple[Any, ...]]) -> None:
        marks = ", ".join("?" * len(model.__table__.columns))
        insert = f"INSERT INTO {model.__tablename__} ({names_of(model)}) VALUES ({marks})"
        with self._connection:
            self._connection.executemany(insert, bound(model, rows))

    def finish(self) -> None:
        self._connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")

    def close(self) -> None:
        with closing(self._connection):
            pass


def names_of(model: type[Base]) -> str:
    """Return the names of the model's columns, as a statement lists them."""
    return ", ".join(column.name for column in model.__table__.columns)


def bound(model: type[Base], rows: Sequence[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    """Return the rows with times in the product's form."""
    dialect = sqlite_dialect.dialect()
    columns = list(zip(*rows, strict=True))
    if not columns:
        return ()
    for place, column in enumerate(model.__table__.columns):
        if isinstance(column.type, UtcDateTime):
            bind = column.type.dialect_impl(dialect).bind_processor(dialect)
            assert bind is not None
            columns[place] = tuple(map(bind, columns[place]))
    return zip(*columns, strict=True)
