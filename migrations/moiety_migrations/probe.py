"""Read of a database's revision with the bare driver, so that a start without migrations is quick."""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path

from moiety_migrations.errors import DatabaseUnreachable
from moiety_platform.db.url import redact, sqlite_path, to_libpq_url

CONNECT_TIMEOUT_S = 5
_QUERY = "SELECT version_num FROM alembic_version"


def read_revision(database_url: str) -> str | None:
    """Return the database's revision; None if it has none yet. Raises DatabaseUnreachable, or BadDatabaseUrl."""
    path = sqlite_path(database_url)
    return _read_postgres(database_url) if path is None else _read_sqlite(path)


def _read_sqlite(path: Path) -> str | None:
    if not path.exists():
        return None
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=CONNECT_TIMEOUT_S)) as connection:
            row = connection.execute(_QUERY).fetchone()
    except sqlite3.Error as error:
        if "no such table" in str(error):
            return None
        raise DatabaseUnreachable(
            f"cannot read the database {path}: {error}; check that it is a SQLite file of ours"
        ) from error
    return str(row[0]) if row else None


def _read_postgres(database_url: str) -> str | None:
    import psycopg  # noqa: PLC0415  (slow, and SQLite needs no driver)

    try:
        with psycopg.connect(with_timeout(to_libpq_url(database_url)), prepare_threshold=None) as connection:
            row = connection.execute(_QUERY).fetchone()
    except psycopg.errors.UndefinedTable:
        return None
    except psycopg.Error as error:
        reason = str(error).strip().splitlines()[0]
        raise DatabaseUnreachable(
            f"cannot reach the database at {redact(database_url)}: {reason}; check the URL and that the server is up"
        ) from error
    return str(row[0]) if row else None


def with_timeout(url: str) -> str:
    """Return the URL with a connection timeout per host, unless it has one."""
    return url if "connect_timeout=" in url else f"{url}{'&' if '?' in url else '?'}connect_timeout={CONNECT_TIMEOUT_S}"
