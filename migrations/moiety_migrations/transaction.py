"""One connection in one transaction, exclusive among migrations; the lock ends with it, also after a crash."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from alembic.runtime.migration import MigrationContext
from sqlalchemy import Connection, NullPool, create_engine, event, exc, text
from sqlalchemy.engine import Engine

from moiety_migrations.errors import DatabaseUnreachable, MigrationError
from moiety_platform.db.url import redact, sqlite_path, to_sync_url

LOCK_TIMEOUT_S = 60
_ADVISORY_LOCK = 0x6D6F_6965_7479  # "moiety"


@contextmanager
def exclusive_connection(database_url: str) -> Iterator[tuple[Connection, str | None]]:
    """Yield a connection and the database's revision, under the migration lock.

    Commits when the block ends without an exception. Raises DatabaseUnreachable when the database cannot be reached or
    another migration holds the lock for too long, MigrationError when the database refuses a statement.
    """
    engine = _open(database_url)
    try:
        with engine.begin() as connection:
            if engine.dialect.name == "postgresql":
                connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_TIMEOUT_S}s'"))
                connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ADVISORY_LOCK})
            yield connection, MigrationContext.configure(connection).get_current_revision()
    except exc.DBAPIError as error:
        kind = DatabaseUnreachable if isinstance(error, exc.OperationalError) else MigrationError
        reason = str(error.orig).strip().splitlines()[0]
        raise kind(f"cannot migrate the database at {redact(database_url)}, nothing was changed: {reason}") from error
    finally:
        engine.dispose()


def _open(database_url: str) -> Engine:
    path = sqlite_path(database_url)
    if path is None:
        without_names = {"prepare_threshold": None}  # a pooler's other clients may use the same names
        return create_engine(to_sync_url(database_url), poolclass=NullPool, connect_args=without_names)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DatabaseUnreachable(f"cannot make the folder {path.parent} ({error.strerror}); choose another") from error
    engine = create_engine(to_sync_url(database_url), poolclass=NullPool, connect_args={"timeout": LOCK_TIMEOUT_S})
    event.listen(engine, "connect", _prepare_sqlite)
    event.listen(engine, "begin", _begin_exclusive)
    return engine


def _prepare_sqlite(connection: Any, _entry: Any) -> None:
    connection.isolation_level = None


def _begin_exclusive(connection: Connection) -> None:
    connection.exec_driver_sql("BEGIN EXCLUSIVE")
