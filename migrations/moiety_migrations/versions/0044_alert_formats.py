"""Formats and event groups of webhooks, and operational alerts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import (
    object_id,
    optional_text,
    required_json,
    required_ms,
    required_text,
    required_time,
    text_key,
)

revision = "0044"
down_revision = "0042"


def upgrade() -> None:
    """Create the tables, and add the columns. Existing webhooks get the event itself, and events of quotas only."""
    op.add_column("webhooks", sa.Column("format", sa.String(16), nullable=False, server_default=sa.text("'json'")))
    op.add_column("webhooks", optional_text("routing_key", 64))
    op.add_column("webhooks", optional_text("events", 200))
    op.execute("UPDATE webhooks SET events = 'quota'")
    op.create_table(
        "operational_alerts",
        object_id(),
        required_text("condition_id", 32),
        required_text("type", 32),
        required_text("status", 16),
        required_text("severity", 16),
        required_text("subject", 300),
        required_text("summary", 1000),
        required_json("details"),
        required_time("at"),
        sa.CheckConstraint("status IN ('firing', 'resolved')", name=op.f("ck_operational_alerts_status_known")),
    )
    op.create_index("ix_operational_alerts_at_id", "operational_alerts", ["at", "id"])
    op.create_table(
        "alert_conditions",
        text_key("kind", 16),
        text_key("subject", 300),
        required_text("id", 32),
        required_text("state", 16),
        required_ms("since_ms"),
        required_ms("seen_ms"),
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
