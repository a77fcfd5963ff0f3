"""Usage sums of completed days, so that a month's usage costs no more than a read of its days."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import key_columns, required_columns

revision = "0018"
down_revision = "0017"

COUNTS = ("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens")
MORE = ("preemptions", "cost_nanodollars", "num_kept", "num_promised")


def upgrade() -> None:
    """Create the tables. They are empty at first: a retention job sums up the existing days during operation."""
    op.create_table(
        "usage_days",
        sa.Column("day", sa.DateTime(timezone=True), primary_key=True),
        *key_columns(sa.Text(), "tenant_id", "project_id", "key_id", "model", "service_class"),
        *required_columns(sa.BigInteger(), *COUNTS),
        sa.Column("ttft_ms", sa.Double(), nullable=False),
        sa.Column("num_ttft", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        *required_columns(sa.BigInteger(), *MORE),
    )
    op.create_table(
        "usage_day_marks",
        sa.Column("day", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("is_done", sa.Boolean(), nullable=False),
    )


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("usage_day_marks")
    op.drop_table("usage_days")
