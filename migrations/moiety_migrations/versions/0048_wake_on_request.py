"""Requests that wait for sleeping engines, the gateway that wakes them, and measured wake times."""

from __future__ import annotations

from alembic import op

from moiety_migrations.columns import required_count, required_ms, required_text, text_key

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "wake_demands",
        text_key("model", 256),
        text_key("owner", 64),
        required_count("num_waiting"),
        required_ms("slo_ms"),
        required_ms("since_ms"),
        required_ms("expires_ms"),
    )
    op.create_table(
        "wake_leases",
        text_key("name", 16),
        required_text("owner", 64),
        required_ms("expires_ms"),
    )
    op.create_table(
        "wake_times",
        text_key("model", 256),
        text_key("kind", 16),
        required_ms("wake_ms"),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("wake_times")
    op.drop_table("wake_leases")
    op.drop_table("wake_demands")
