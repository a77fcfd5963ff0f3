"""Agent runs, and their requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns, required_columns

revision = "0039"
down_revision = "0038"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "agent_runs",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        *optional_columns(sa.BigInteger(), "budget_nano", "budget_tokens"),
        sa.Column("deadline_at", sa.DateTime(timezone=True)),
        *optional_columns(sa.Integer(), "deadline_s", "keep_s"),
        *required_columns(sa.BigInteger(), "used_nano", "used_tokens", "num_requests"),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stopped_at", sa.DateTime(timezone=True)),
        sa.UniqueConstraint("tenant_id", "name", name="uq_agent_runs_tenant_id_name"),
        sa.CheckConstraint("status IN ('active', 'stopped')", name=op.f("ck_agent_runs_status_known")),
    )
    op.create_index("ix_agent_runs_created_at_id", "agent_runs", ["created_at", "id"])
    op.create_table(
        "agent_run_requests",
        sa.Column("run_id", sa.String(32), primary_key=True),
        sa.Column("request_id", sa.String(64), primary_key=True),
        *required_columns(sa.String(32), "tenant_id", "trace_id"),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("outcome", sa.String(16), nullable=False),
        sa.Column("error_code", sa.String(64)),
        *required_columns(sa.BigInteger(), "tokens", "nano", "prompt_tokens", "cached_tokens", "output_tokens"),
        sa.Column("duration_ms", sa.Double()),
    )
    op.create_index("ix_agent_run_requests_tenant_id", "agent_run_requests", ["tenant_id"])
    op.create_index("ix_agent_run_requests_run_id_started_at", "agent_run_requests", ["run_id", "started_at"])


def downgrade() -> None:
    """Drop them."""
    op.drop_table("agent_run_requests")
    op.drop_table("agent_runs")
