"""Engines of a device group that gave way to another model, so that every gateway can wake them again."""

from __future__ import annotations

from alembic import op

from moiety_migrations.columns import required_ms, required_text, text_key

revision = "0051"
down_revision = "0050"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "wake_switches",
        text_key("address", 300),
        required_text("model", 256),
        required_ms("at_ms"),
    )


def downgrade() -> None:
    """Drop it."""
    op.drop_table("wake_switches")
