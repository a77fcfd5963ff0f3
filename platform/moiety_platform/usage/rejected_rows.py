"""Proof that a usage row itself causes an error: only then may the row be quarantined instead of being retried.

The database is queried twice: the row alone fails with an error about values, and a plain row takes the same path
through the same tables without one. Any other error, of a pooler or a driver, a full disk or a lost race, says nothing
about the row.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from sqlalchemy import exc as sa

from moiety_platform.db.session import Database
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows

# Errors of the driver, or of the conversion of a row to database values, for a row that was not stored.
REFUSALS = (sa.StatementError, ArithmeticError, TypeError, ValueError)

_VALUE_CLASSES = frozenset({"22", "23"})  # SQLSTATE: data exception, integrity constraint violation


class _Undo(Exception):
    """Internal exception that rolls a transaction back."""


def is_value_error(error: BaseException) -> bool:
    """Return whether the error is about the values to write, not about how or where."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if isinstance(state, str) and state:
        return state[:2] in _VALUE_CLASSES
    if not isinstance(error, sa.DBAPIError):
        return True  # raised before anything was sent
    if isinstance(error, sa.DataError | sa.IntegrityError):
        return True
    return isinstance(error.orig, ValueError) or isinstance(getattr(error.orig, "__cause__", None), ValueError)


async def accepts_plain_rows(database: Database) -> bool:
    """Return whether a row without unusual values can be written now; it is rolled back. Raises Unavailable."""
    try:
        async with database.write() as session:
            await insert_rows(session, [_plain_row()])
            raise _Undo
    except _Undo:
        return True
    except REFUSALS:
        return False


def _plain_row() -> UsageRow:
    return UsageRow(
        request_id=f"plain-{secrets.token_hex(12)}",
        tenant_id="none",
        project_id="none",
        key_id="none",
        endpoint="none",
        model="none",
        service_class="none",
        started_at=datetime.now(UTC),
        outcome="stop",
        http_status=200,
        num_choices=1,
        prompt_tokens=1,
        cached_tokens=0,
        output_tokens=1,
        queue_ms=0.0,
        ttft_ms=0.0,
        duration_ms=0.0,
    )
