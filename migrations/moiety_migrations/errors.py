"""What a migration raises on purpose.

MigrationError         the migration cannot be done, and nothing was changed
├── DatabaseAway      the database cannot be reached; it may be worth another try
├── DatabaseTooNew    a later release has been at this database
└── UnknownRevision   there is no such revision to go back to
"""

from __future__ import annotations

from moiety_platform.errors import PlatformError


class MigrationError(PlatformError):
    """Root; the message says what to do next. A PlatformError, so that a gateway that migrates at its start can tell
    it."""


class DatabaseAway(MigrationError):
    pass


class DatabaseTooNew(MigrationError):
    pass


class UnknownRevision(MigrationError):
    pass
