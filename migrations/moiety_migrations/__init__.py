"""Schema migrations: bring a database to the schema that this release of the gateway needs.

The package owns the Alembic environment and the versions. Its import is cheap; Alembic is loaded only when there is a
migration to run.
"""

from moiety_migrations.errors import DatabaseTooNew, DatabaseUnreachable, MigrationError, UnknownRevision
from moiety_migrations.revisions import HEAD, REVISIONS
from moiety_migrations.run import current, downgrade, upgrade

__all__ = [
    "HEAD",
    "REVISIONS",
    "DatabaseTooNew",
    "DatabaseUnreachable",
    "MigrationError",
    "UnknownRevision",
    "current",
    "downgrade",
    "upgrade",
]
