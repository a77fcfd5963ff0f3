"""Indexes of large tables in PostgreSQL, which are built while gateways write to the tables.

`CREATE INDEX` in the transaction of a migration would block every write to its table until the migration has ended.
`CREATE INDEX CONCURRENTLY` blocks none, but runs in no transaction. So a revision leaves such an index out, and every
upgrade builds what is missing after its transaction, also what an interrupted build has left invalid. The schema
without the index is complete: queries that use it are only slower.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import LiteralString

import psycopg
import psycopg.sql

from moiety_migrations.errors import DatabaseUnreachable, MigrationError
from moiety_migrations.probe import with_timeout
from moiety_platform.db.url import redact, to_libpq_url

CONCURRENT_INDEXES: Mapping[str, LiteralString] = MappingProxyType(
    {
        "ix_usage_end_user": 'ON "usage" (tenant_id, end_user, started_at) '
        "WHERE end_user IS NOT NULL OR tags IS NOT NULL",
        "ix_usage_end_user_any_tenant": 'ON "usage" (end_user, started_at, request_id) '
        "WHERE end_user IS NOT NULL OR tags IS NOT NULL",
        "ix_usage_unsuccessful": 'ON "usage" (started_at, request_id) '
        "WHERE http_status >= 400 OR error_code IS NOT NULL",
        "ix_usage_unsuccessful_tenant": 'ON "usage" (tenant_id, started_at) '
        "WHERE http_status >= 400 OR error_code IS NOT NULL",
        "ix_usage_quoted": 'ON "usage" (started_at, request_id) '
        "WHERE guarantee_met IS NOT NULL OR predicted_ttft_ms IS NOT NULL",
        "ix_usage_quoted_tenant": 'ON "usage" (tenant_id, started_at) '
        "WHERE guarantee_met IS NOT NULL OR predicted_ttft_ms IS NOT NULL",
        "ix_traces_unsuccessful": 'ON "traces" (outcome, started_at, span_id, service_class, duration_ms) '
        "WHERE outcome IN ('failed', 'rejected', 'disconnected')",
    }
)
"""Table, columns and condition of each index by its name."""

_LOCK = 0x6D6F_6965_7478  # "moietx", so that it is held beside the lock of migrations
_LOCK_IF_FREE = psycopg.sql.SQL("SELECT pg_try_advisory_xact_lock({})").format(psycopg.sql.Literal(_LOCK))
_FIND_VALID: LiteralString = (
    "SELECT relname FROM pg_index JOIN pg_class ON pg_class.oid = indexrelid "
    "WHERE relname = ANY(%s) AND indisvalid AND pg_table_is_visible(indrelid)"
)


def build_missing_indexes(database_url: str) -> None:
    """Build the indexes that a PostgreSQL database does not have yet, unless another process is building them.

    Idempotent. Raises DatabaseUnreachable or MigrationError.
    """
    url = with_timeout(to_libpq_url(database_url))
    try:
        with psycopg.connect(url, prepare_threshold=None) as lock:
            if not _missing(lock):
                return
            lock.rollback()
            # The lock ends with its connection, also after a crash. The build waits for the end of every older
            # snapshot, so this transaction must hold none: no transaction waits for the lock, and a statement without
            # parameters leaves no portal open.
            if lock.execute(_LOCK_IF_FREE).fetchone() != (True,):
                return
            with psycopg.connect(url, prepare_threshold=None, autocommit=True) as connection:
                for name in _missing(connection):
                    _build(connection, name)
    except psycopg.OperationalError as error:
        raise DatabaseUnreachable(
            f"cannot build the indexes of the database at {redact(database_url)}: {_first_line(error)}; the schema is "
            "up to date, so start the upgrade again when the server is up"
        ) from error
    except psycopg.Error as error:
        raise MigrationError(
            f"cannot build the indexes of the database at {redact(database_url)}: {_first_line(error)}; the schema is "
            "up to date, so start the upgrade again once that is mended"
        ) from error


def _missing(connection: psycopg.Connection) -> list[str]:
    valid = {str(name) for (name,) in connection.execute(_FIND_VALID, (list(CONCURRENT_INDEXES),))}
    return [name for name in CONCURRENT_INDEXES if name not in valid]


def _build(connection: psycopg.Connection, name: str) -> None:
    index = psycopg.sql.Identifier(name)
    drop, build = psycopg.sql.SQL("DROP INDEX CONCURRENTLY IF EXISTS {}"), psycopg.sql.SQL(CONCURRENT_INDEXES[name])
    connection.execute(drop.format(index))  # an invalid one, of a build that was interrupted
    connection.execute(psycopg.sql.SQL("CREATE INDEX CONCURRENTLY {} ").format(index) + build)


def _first_line(error: psycopg.Error) -> str:
    return str(error).strip().splitlines()[0]
