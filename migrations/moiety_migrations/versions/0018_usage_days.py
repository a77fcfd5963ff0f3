"""Usage sums of completed days, so that a month's usage costs no more than a read of its days."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"

COUNTS = ("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens")
MORE = ("preemptions", "cost_nanodollars", "num_kept", "num_promised")


def _count(name: str) -> sa.Column[int]:
    return sa.Column(name, sa.BigInteger(), nullable=False)


def upgrade() -> None:
    """Create the tables. They are empty at first: a retention job sums up the existing days during operation."""
    op.create_table(
        "usage_days",
        sa.Column("day", sa.DateTime(timezone=True), primary_key=True),
        *(
            sa.Column(name, sa.Text(), primary_key=True)
            for name in ("tenant_id", "project_id", "key_id", "model", "service_class")
        ),
        *(_count(name) for name in COUNTS),
        sa.Column("ttft_ms", sa.Double(), nullable=False),
        _count("num_ttft"),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        *(_count(name) for name in MORE),
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
