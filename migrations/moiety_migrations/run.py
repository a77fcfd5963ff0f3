"""Upgrade, downgrade, current. If several processes start at once, one migrates and the others wait for it."""

from __future__ import annotations

from pathlib import Path

from moiety_migrations.errors import DatabaseTooNew, UnknownRevision
from moiety_migrations.probe import read_revision
from moiety_migrations.revisions import HEAD, REVISIONS
from moiety_platform.db.url import sqlite_path

BASE = "base"


def upgrade(database_url: str) -> str:
    """Upgrade the database to this release's schema, creating it if needed; return the revision.

    The upgrade is atomic and safe to call from several processes at once. Indexes of large tables in PostgreSQL are
    built after it. Raises DatabaseTooNew, DatabaseUnreachable, or BadDatabaseUrl.
    """
    if _known(read_revision(database_url)) != HEAD:
        _migrate(database_url, HEAD, upwards=True)
    if sqlite_path(database_url) is None:
        from moiety_migrations.concurrent_indexes import build_missing_indexes  # noqa: PLC0415  (loads the driver)

        build_missing_indexes(database_url)
    return HEAD


def downgrade(database_url: str, revision: str) -> str:
    """Downgrade to an earlier revision, or to an empty schema with "base"; data without a place there is lost.

    Raises UnknownRevision, DatabaseTooNew, DatabaseUnreachable, or BadDatabaseUrl.
    """
    if revision != BASE and revision not in REVISIONS:
        raise UnknownRevision(f"there is no revision {revision!r}; give one of {', '.join((BASE, *REVISIONS))}")
    if _known(read_revision(database_url)) is not None:
        _migrate(database_url, revision, upwards=False)
    return revision


def current(database_url: str) -> str | None:
    """Return the database's revision, None if it has none. Raises DatabaseUnreachable, or BadDatabaseUrl."""
    return read_revision(database_url)


def _migrate(database_url: str, target: str, *, upwards: bool) -> None:
    from alembic import command  # noqa: PLC0415  (heavy; most starts have nothing to do)
    from alembic.config import Config  # noqa: PLC0415

    from moiety_migrations.transaction import exclusive_connection  # noqa: PLC0415  (loads SQLAlchemy)

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with exclusive_connection(database_url) as (connection, revision):
        at = _known(revision)  # again, since another process may have migrated during the wait
        if upwards and at == HEAD:
            return
        config.attributes["connection"] = connection
        (command.upgrade if upwards else command.downgrade)(config, target)


def _known(revision: str | None) -> str | None:
    """Return the revision, if this release knows it."""
    if revision is not None and revision not in REVISIONS:
        raise DatabaseTooNew(
            f"the database is at revision {revision}, which this release (at {HEAD}) does not know: a newer release "
            "has migrated it; run that release or a later one, or point this one at another database"
        )
    return revision
