"""Kept traces and their spans."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns, required_columns

revision = "0014"
down_revision = "0013"

SEARCHED = ("started_at", "span_id", "service_class", "outcome", "duration_ms")


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "traces",
        sa.Column("trace_id", sa.String(32), primary_key=True),
        sa.Column("span_id", sa.String(16), primary_key=True),
        *required_columns(sa.Text(), "request_id", "tenant_id", "service_class", "operation", "model"),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        *optional_columns(sa.Text(), "reason", "error_code"),
        sa.Column("kept_for", sa.Text(), nullable=False),
        sa.Column("stored_ms", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_traces_started_at", "traces", [*SEARCHED])
    op.create_index("ix_traces_tenant_id", "traces", ["tenant_id", *SEARCHED])
    op.create_index("ix_traces_request_id", "traces", ["request_id"])
    op.create_index("ix_traces_stored_ms", "traces", ["stored_ms"])
    op.create_table(
        "spans",
        sa.Column("trace_id", sa.String(32), primary_key=True),
        sa.Column("span_id", sa.String(16), primary_key=True),
        sa.Column("parent_id", sa.String(16)),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("kind", sa.SmallInteger(), nullable=False),
        *required_columns(sa.Text(), "service", "tenant_id"),
        *required_columns(sa.BigInteger(), "start_ns", "end_ns"),
        sa.Column("status", sa.SmallInteger(), nullable=False),
        sa.Column("status_message", sa.Text(), nullable=False),
        *required_columns(sa.JSON(), "attributes", "events", "links"),
        sa.Column("stored_ms", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_spans_tenant_id", "spans", ["tenant_id"])
    op.create_index("ix_spans_stored_ms", "spans", ["stored_ms"])


def downgrade() -> None:
    """Drop the tables and their rows."""
    op.drop_table("spans")
    op.drop_table("traces")
