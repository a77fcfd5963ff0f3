"""Formats and event groups of webhooks, and operational alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0044"
down_revision = "0042"


def upgrade() -> None:
    """Create the tables, and add the columns. Existing webhooks get the event itself, and events of quotas only."""
    op.add_column("webhooks", sa.Column("format", sa.String(16), nullable=False, server_default=sa.text("'json'")))
    op.add_column("webhooks", sa.Column("routing_key", sa.String(64)))
    op.add_column("webhooks", sa.Column("events", sa.String(200)))
    op.execute("UPDATE webhooks SET events = 'quota'")
    op.create_table(
        "operational_alerts",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("condition_id", sa.String(32), nullable=False),
        sa.Column("type", sa.String(32), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("severity", sa.String(16), nullable=False),
        sa.Column("subject", sa.String(300), nullable=False),
        sa.Column("summary", sa.String(1000), nullable=False),
        sa.Column("details", sa.JSON(), nullable=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.CheckConstraint("status IN ('firing', 'resolved')", name=op.f("ck_operational_alerts_status_known")),
    )
    op.create_index("ix_operational_alerts_at_id", "operational_alerts", ["at", "id"])
    op.create_table(
        "alert_conditions",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("subject", sa.String(300), primary_key=True),
        sa.Column("id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("since_ms", sa.BigInteger(), nullable=False),
        sa.Column("seen_ms", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'firing')", name=op.f("ck_alert_conditions_state_known")),
    )


def downgrade() -> None:
    """Drop them, and the webhooks whose bodies an earlier release cannot make, with their pending events."""
    op.execute("DELETE FROM webhook_deliveries WHERE alert_id IN (SELECT id FROM operational_alerts)")
    op.drop_table("alert_conditions")
    op.drop_table("operational_alerts")
    other = "SELECT id FROM webhooks WHERE format <> 'json'"
    op.execute(f"DELETE FROM webhook_deliveries WHERE webhook_id IN ({other})")
    op.execute("DELETE FROM webhooks WHERE format <> 'json'")
    for column in ("events", "routing_key", "format"):
        op.drop_column("webhooks", column)
