"""Request log: the trace of each request, indexes of unsuccessful requests, and contents of tenants that opted in."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0037"
down_revision = "0036"

_INDEXES = {
    "ix_usage_unsuccessful": ["started_at", "request_id"],
    "ix_usage_unsuccessful_tenant": ["tenant_id", "started_at"],
}
_IS_UNSUCCESSFUL = "http_status >= 400 OR error_code IS NOT NULL"


def upgrade() -> None:
    """Create the tables, and add the column and the indexes. Existing rows have no trace, and no tenant has opted in.

    PostgreSQL builds the indexes after the upgrade, while gateways write (`concurrent_indexes.py`).
    """
    op.add_column("usage", sa.Column("trace_id", sa.String(32)))
    if op.get_context().dialect.name == "sqlite":
        for name, columns in _INDEXES.items():
            op.create_index(name, "usage", columns, sqlite_where=sa.text(_IS_UNSUCCESSFUL))
    op.create_table(
        "content_logging",
        sa.Column("tenant_id", sa.String(32), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("keep_days", sa.Integer(), nullable=False),
        sa.Column("set_at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("keep_days BETWEEN 1 AND 90", name=op.f("ck_content_logging_keep_days_in_range")),
    )
    op.create_table(
        "request_contents",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("sealed", sa.LargeBinary(), nullable=False),
        *required_columns(sa.BigInteger(), "stored_ms", "expires_ms"),
    )
    op.create_index("ix_request_contents_expires_ms", "request_contents", ["expires_ms"])
    op.create_index("ix_request_contents_tenant_id", "request_contents", ["tenant_id"])


def downgrade() -> None:
    """Drop them, with the contents."""
    op.drop_table("request_contents")
    op.drop_table("content_logging")
    for name in _INDEXES:
        op.drop_index(name, "usage", if_exists=True)
    op.drop_column("usage", "trace_id")
