"""Leases of retention jobs, indexes for old windows and alerts, and sums of deleted requests."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns
from moiety_migrations.stored_names import former_table

revision = "0013"
down_revision = "0012"

SUMS = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars")


def upgrade() -> None:
    """Create the tables and the indexes."""
    op.create_table(
        former_table("retention_jobs"),
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64)),
        sa.Column("available_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "usage_cuts",
        sa.Column("hour", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("tenant_id", sa.Text(), primary_key=True),
        *required_columns(sa.BigInteger(), *SUMS),
    )
    op.create_index("ix_quota_windows_start", "quota_windows", ["start"])
    op.create_index("ix_quota_alerts_start", "quota_alerts", ["start"])


def downgrade() -> None:
    """Drop the tables and the indexes. Where requests were deleted, only the ledger then proves the sums."""
    op.drop_index("ix_quota_alerts_start", "quota_alerts")
    op.drop_index("ix_quota_windows_start", "quota_windows")
    op.drop_table("usage_cuts")
    op.drop_table(former_table("retention_jobs"))
