"""Recognition of a full disk among the errors of files and databases."""

from __future__ import annotations

import errno

FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})  # no space, no quota, above the limit of a file's size
SQLITE_FULL = "database or disk is full"
DISK_FULL_STATE = "53100"  # SQLSTATE of PostgreSQL


def is_disk_full(error: BaseException) -> bool:
    """Return whether the error of a file operation says that there is no space."""
    return isinstance(error, OSError) and error.errno in FULL


def store_advice(error: BaseException) -> str:
    """Return what to do about an error of the store, or of a file in its place, whose cause is the driver's error."""
    full = any(is_database_full(one) for one in (error, error.__cause__) if one is not None)
    return "free some space on the disk that is full" if full else "restore the connection to the database"


def is_database_full(error: BaseException) -> bool:
    """Return whether the error of a database, or of its driver, says that its disk is full."""
    for one in (error, getattr(error, "orig", None)):
        state = getattr(one, "sqlstate", None) or getattr(one, "pgcode", None)
        if state == DISK_FULL_STATE or (one is not None and SQLITE_FULL in str(one)):
            return True
    return is_disk_full(error)
