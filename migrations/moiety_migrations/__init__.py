"""Brings a database to the schema that this release of the gateway needs.

Owns the Alembic environment and the versions. Importing it is cheap; Alembic is loaded only when there is something
to do.
"""

from moiety_migrations.errors import DatabaseAway, DatabaseTooNew, MigrationError, UnknownRevision
from moiety_migrations.revisions import HEAD, REVISIONS
from moiety_migrations.run import current, downgrade, upgrade

__all__ = [
    "HEAD",
    "REVISIONS",
    "DatabaseAway",
    "DatabaseTooNew",
    "MigrationError",
    "UnknownRevision",
    "current",
    "downgrade",
    "upgrade",
]
