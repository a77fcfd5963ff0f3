"""Errors that a migration raises on purpose.

MigrationError         the migration cannot be done, and nothing was changed
├── DatabaseUnreachable      the database cannot be reached; a retry may succeed
├── DatabaseTooNew    a later release has migrated this database
└── UnknownRevision   the revision to downgrade to does not exist
"""

from __future__ import annotations

from moiety_platform.errors import PlatformError


class MigrationError(PlatformError):
    """Base class; the message says what to do next.

    It is a PlatformError, so that a gateway that migrates at its start can report it.
    """


class DatabaseUnreachable(MigrationError):
    pass


class DatabaseTooNew(MigrationError):
    pass


class UnknownRevision(MigrationError):
    pass
