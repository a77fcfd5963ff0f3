"""Indexes of searches: requests of an end user of any tenant, and stored traces of unsuccessful requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0054"
down_revision = "0053"

_INDEXES = {
    "ix_usage_end_user_any_tenant": (
        "usage",
        ["end_user", "started_at", "request_id"],
        "end_user IS NOT NULL OR tags IS NOT NULL",
    ),
    "ix_traces_unsuccessful": (
        "traces",
        ["outcome", "started_at", "span_id", "service_class", "duration_ms"],
        "outcome IN ('failed', 'rejected', 'disconnected')",
    ),
}


def upgrade() -> None:
    """Add the indexes to SQLite.

    PostgreSQL builds them after the upgrade, while gateways write (`concurrent_indexes.py`).
    """
    if op.get_context().dialect.name == "sqlite":
        for name, (table, columns, condition) in _INDEXES.items():
            op.create_index(name, table, columns, sqlite_where=sa.text(condition))


def downgrade() -> None:
    """Drop them."""
    for name, (table, _, _) in _INDEXES.items():
        op.drop_index(name, table, if_exists=True)
