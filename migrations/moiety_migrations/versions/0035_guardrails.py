"""Guardrails."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0035"
down_revision = "0034"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "guardrails",
        sa.Column("name", sa.String(64), primary_key=True),
        *required_columns(sa.String(16), "stage", "action", "on_failure"),
        sa.Column("detectors", sa.Text(), nullable=False),
        sa.Column("url", sa.String(1000)),
        sa.Column("timeout_ms", sa.Integer(), nullable=False),
        sa.Column("tenant_id", sa.String(32)),
        sa.CheckConstraint("stage IN ('input', 'output')", name=op.f("ck_guardrails_stage_known")),
        sa.CheckConstraint("action IN ('block', 'observe')", name=op.f("ck_guardrails_action_known")),
        sa.CheckConstraint("on_failure IN ('open', 'closed')", name=op.f("ck_guardrails_on_failure_known")),
        sa.CheckConstraint("(detectors = '') = (url IS NOT NULL)", name=op.f("ck_guardrails_one_check")),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("guardrails")
