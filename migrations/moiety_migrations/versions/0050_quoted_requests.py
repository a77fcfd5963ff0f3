"""Indexes of requests with a quote, so that their report reads no other requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0050"
down_revision = "0049"

_INDEXES = {"ix_usage_quoted": ["started_at", "request_id"], "ix_usage_quoted_tenant": ["tenant_id", "started_at"]}
_IS_QUOTED = "guarantee_met IS NOT NULL OR predicted_ttft_ms IS NOT NULL"


def upgrade() -> None:
    """Add the indexes to SQLite.

    PostgreSQL builds them after the upgrade, while gateways write (`concurrent_indexes.py`).
    """
    if op.get_context().dialect.name == "sqlite":
        for name, columns in _INDEXES.items():
            op.create_index(name, "usage", columns, sqlite_where=sa.text(_IS_QUOTED))


def downgrade() -> None:
    """Drop them."""
    for name in _INDEXES:
        op.drop_index(name, "usage", if_exists=True)
