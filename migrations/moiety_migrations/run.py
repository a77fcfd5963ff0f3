"""Upgrade, downgrade, current. Of several processes that start at once, one migrates and the others wait for it."""

from __future__ import annotations

from pathlib import Path

from moiety_migrations.errors import DatabaseTooNew, UnknownRevision
from moiety_migrations.probe import read_revision
from moiety_migrations.revisions import HEAD, REVISIONS

BASE = "base"


def upgrade(database_url: str) -> str:
    """Bring the database to this release's schema, creating it if need be; returns the revision. All or nothing, and
    safe to call from several processes at once. Raises DatabaseTooNew, DatabaseAway, or BadDatabaseUrl."""
    if _known(read_revision(database_url)) == HEAD:
        return HEAD
    _migrate(database_url, HEAD, upwards=True)
    return HEAD


def downgrade(database_url: str, revision: str) -> str:
    """Go back to an earlier revision, or to nothing with "base"; data that the earlier schema has no place for is lost.
    Raises UnknownRevision, DatabaseTooNew, DatabaseAway, or BadDatabaseUrl."""
    if revision != BASE and revision not in REVISIONS:
        raise UnknownRevision(f"there is no revision {revision!r}; give one of {', '.join((BASE, *REVISIONS))}")
    if _known(read_revision(database_url)) is not None:
        _migrate(database_url, revision, upwards=False)
    return revision


def current(database_url: str) -> str | None:
    """The revision that the database is at, None if it has none. Raises DatabaseAway, or BadDatabaseUrl."""
    return read_revision(database_url)


def _migrate(database_url: str, target: str, *, upwards: bool) -> None:
    from alembic import command  # noqa: PLC0415  (heavy; most starts have nothing to do)
    from alembic.config import Config  # noqa: PLC0415

    from moiety_migrations.transaction import exclusive_connection  # noqa: PLC0415  (loads SQLAlchemy)

    config = Config()
    config.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    with exclusive_connection(database_url) as (connection, revision):
        at = _known(revision)  # again, since another process may have been at it while this one waited
        if upwards and at == HEAD:
            return
        config.attributes["connection"] = connection
        (command.upgrade if upwards else command.downgrade)(config, target)


def _known(revision: str | None) -> str | None:
    """The revision, if this release knows it."""
    if revision is not None and revision not in REVISIONS:
        raise DatabaseTooNew(
            f"the database is at revision {revision}, which this release (at {HEAD}) does not know: a newer release "
            "has migrated it; run that release or a later one, or point this one at another database"
        )
    return revision
