"""Whose turn the chores of upkeep are, and what old windows and alerts are found by."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0011"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table and the indexes."""
    op.create_table(
        "upkeep",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("owner", sa.String(64)),
        sa.Column("available_ms", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_quota_windows_start", "quota_windows", ["start"])
    op.create_index("ix_quota_alerts_start", "quota_alerts", ["start"])


def downgrade() -> None:
    """Take them away again."""
    op.drop_index("ix_quota_alerts_start", "quota_alerts")
    op.drop_index("ix_quota_windows_start", "quota_windows")
    op.drop_table("upkeep")
