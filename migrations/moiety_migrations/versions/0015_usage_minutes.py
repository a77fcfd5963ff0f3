"""Usage sums of the last hours by minute, tenant and class, for the dashboard."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import key_columns, required_columns

revision = "0015"
down_revision = "0014"

COUNTS = (
    *("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens"),
    *("good_tokens", "num_ttft", "num_queue", "preemptions", "num_kept", "num_promised"),
)
TIMES = ("ttft_ms", "queue_ms", "duration_ms")


def upgrade() -> None:
    """Create the table. It is empty at first: earlier usage is in the hourly sums."""
    op.create_table(
        "usage_minutes",
        sa.Column("minute", sa.Integer(), primary_key=True, autoincrement=False),
        *key_columns(sa.Text(), "tenant_id", "service_class"),
        *required_columns(sa.BigInteger(), *COUNTS),
        *required_columns(sa.Double(), *TIMES),
    )


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("usage_minutes")
