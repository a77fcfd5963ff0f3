"""Whether an error is a usage row's own: only then may the row be set aside instead of being tried again.

The database is asked twice. The row fails alone with an error about values, and a plain row takes the same way through
the same tables without one. Every other error, a pooler's or a driver's, a full disk or a lost race, says nothing about
the row.
"""

from __future__ import annotations

import secrets
from datetime import UTC, datetime

from sqlalchemy import exc as sa

from moiety_platform.db.session import Database
from moiety_platform.usage.row import UsageRow
from moiety_platform.usage.store import insert_rows

# What the driver, or what turns a row into the database's values, raises for a row that was not stored.
REFUSALS = (sa.StatementError, ArithmeticError, TypeError, ValueError)

_VALUE_CLASSES = frozenset({"22", "23"})  # SQLSTATE: data exception, integrity constraint violation


class _Undo(Exception):
    """Ends a transaction without keeping what it wrote."""


def is_about_values(error: BaseException) -> bool:
    """Whether the error is about what was to be written, and not about how or where."""
    state = getattr(getattr(error, "orig", None), "sqlstate", None)
    if isinstance(state, str) and state:
        return state[:2] in _VALUE_CLASSES
    if not isinstance(error, sa.DBAPIError):
        return True  # raised before anything was sent
    if isinstance(error, sa.DataError | sa.IntegrityError):
        return True
    return isinstance(error.orig, ValueError) or isinstance(getattr(error.orig, "__cause__", None), ValueError)


async def takes_plain_rows(database: Database) -> bool:
    """Whether a row of which nothing is unusual can be written now; it is not kept. Raises Unavailable."""
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
