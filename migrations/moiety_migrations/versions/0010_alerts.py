"""Thresholds of limits, the alerts when usage passes them, and the webhooks that receive the alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import key_columns, optional_columns, required_columns

revision = "0010"
down_revision = "0009"


def upgrade() -> None:
    """Create the four tables."""
    op.create_table(
        "quota_thresholds",
        sa.Column("quota_id", sa.String(32), primary_key=True),
        sa.Column("percent", sa.Integer(), primary_key=True, autoincrement=False),
        sa.CheckConstraint("percent BETWEEN 1 AND 100", name=op.f("ck_quota_thresholds_percent_in_range")),
    )
    op.create_table(
        "quota_alerts",
        sa.Column("quota_id", sa.String(32), primary_key=True),
        sa.Column("start", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("percent", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("tenant_id", sa.String(32)),
        sa.Column("level", sa.String(16), nullable=False),
        *required_columns(sa.String(32), "scope_id", "kind"),
        *required_columns(sa.BigInteger(), "cap", "used"),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_quota_alerts_id", "quota_alerts", ["id"], unique=True)
    op.create_table(
        "webhooks",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("url", sa.String(1000), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        *optional_columns(sa.BigInteger(), "delivered_ms", "failed_ms"),
        sa.Column("last_error", sa.String(64)),
    )
    op.create_table(
        "webhook_deliveries",
        *key_columns(sa.String(32), "webhook_id", "alert_id"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_tries", sa.Integer(), nullable=False),
        sa.Column("available_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'dead')", name=op.f("ck_webhook_deliveries_state_known")),
    )
    op.create_index("ix_webhook_deliveries_state_available_ms", "webhook_deliveries", ["state", "available_ms"])


def downgrade() -> None:
    """Drop the tables and their rows."""
    for table in ("webhook_deliveries", "webhooks", "quota_alerts", "quota_thresholds"):
        op.drop_table(table)
