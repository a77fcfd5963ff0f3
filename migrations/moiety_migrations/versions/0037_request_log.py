"""Request log: the trace of each request, and indexes of the requests that were not successful."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0037"
down_revision = "0036"

_INDEXES = {
    "ix_usage_unsuccessful": ["started_at", "request_id"],
    "ix_usage_unsuccessful_tenant": ["tenant_id", "started_at"],
}
_IS_UNSUCCESSFUL = "http_status >= 400 OR error_code IS NOT NULL"


def upgrade() -> None:
    """Add the column and the indexes. Existing rows have no trace.

    PostgreSQL builds the indexes after the upgrade, while gateways write (`concurrent_indexes.py`).
    """
    op.add_column("usage", sa.Column("trace_id", sa.String(32)))
    if op.get_context().dialect.name == "sqlite":
        for name, columns in _INDEXES.items():
            op.create_index(name, "usage", columns, sqlite_where=sa.text(_IS_UNSUCCESSFUL))


def downgrade() -> None:
    """Drop them."""
    for name in _INDEXES:
        op.drop_index(name, "usage", if_exists=True)
    op.drop_column("usage", "trace_id")
