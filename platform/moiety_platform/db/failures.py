"""Classification of store errors: an unavailable store is worth a retry, a wrong statement is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sqlalchemy import exc as sa

from moiety_platform.disk_full import is_database_full
from moiety_platform.errors import Unavailable

RETRY_AFTER_S = 1.0
UNMIGRATED = "store_unmigrated"

# SQLSTATE classes and codes of PostgreSQL that time or an operator resolves: connection, refused credentials or
# database, resources, operator intervention, system error; then read-only servers, lost races for locks or
# serialisation, missing tables or tables without permission, and prepared statements or cursors that a pooler has left
# on another server connection.
_AWAY_CLASSES = frozenset({"08", "28", "3D", "53", "57", "58"})
_AWAY_CODES = frozenset({"25006", "26000", "34000", "40001", "40P01", "42501", "42P05", "55P03"})
_UNMIGRATED_CODES = frozenset({"42P01", "42703"})
_UNMIGRATED_WORDS = ("no such table", "no such column", "has no column named")  # SQLite has one code for all errors


def is_unreachable(error: BaseException) -> bool:
    """Return whether the store could not be reached or could not serve, whatever the statement was."""
    if isinstance(error, OSError | sa.TimeoutError):  # refused, reset, timed out; no connection left in the pool
        return True
    state = _sqlstate(error)
    if state:
        return state[:2] in _AWAY_CLASSES or state in _AWAY_CODES or state in _UNMIGRATED_CODES
    if not isinstance(error, sa.DBAPIError):
        return False
    if isinstance(error.orig, ValueError) or isinstance(getattr(error.orig, "__cause__", None), ValueError):
        return False  # the driver could not encode a parameter
    return error.connection_invalidated or isinstance(error, sa.OperationalError | sa.InterfaceError)


def is_unmigrated(error: BaseException) -> bool:
    """Return whether the store lacks a table or column that this release needs."""
    state = _sqlstate(error)
    if state or not isinstance(error, sa.OperationalError):
        return state in _UNMIGRATED_CODES
    return any(words in str(error.orig) for words in _UNMIGRATED_WORDS)


def is_bad_value(error: BaseException) -> bool:
    """Return whether the store or its driver rejects a value of the statement.

    Examples are a NUL character, a lone surrogate, and a number or time outside its range.
    """
    if _sqlstate(error)[:2] == "22" or isinstance(error, sa.DataError):
        return True
    of_driver = error.orig if isinstance(error, sa.StatementError) else error
    causes = of_driver, getattr(of_driver, "__cause__", None)
    return any(isinstance(one, OverflowError | UnicodeError) for one in causes)


@contextmanager
def unavailable_if_unreachable() -> Iterator[None]:
    """Raise Unavailable in place of the driver's error when the store is away; let other errors through."""
    try:
        yield
    except Exception as error:  # raised again unless the store is away
        if not is_unreachable(error):
            raise
        if is_unmigrated(error):
            raise Unavailable(
                "The database lacks tables that this release needs; the operator must run: moiety migrate upgrade",
                code=UNMIGRATED,
                retry_after_s=RETRY_AFTER_S,
            ) from error
        if is_database_full(error):
            raise Unavailable(
                "The disk of the database is full; the operator must free some space on it.",
                code="store_unavailable",
                retry_after_s=RETRY_AFTER_S,
            ) from error
        raise Unavailable(
            "The database cannot be reached right now; try again shortly.",
            code="store_unavailable",
            retry_after_s=RETRY_AFTER_S,
        ) from error


def _sqlstate(error: BaseException) -> str:
    for candidate in (error, getattr(error, "orig", None)):
        state = getattr(candidate, "sqlstate", None) or getattr(candidate, "pgcode", None)
        if isinstance(state, str):
            return state
    return ""
