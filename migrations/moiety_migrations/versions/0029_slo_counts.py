"""Renames to the field's terms: counts of requests with an SLO, and the table of tenant data deletions."""

from __future__ import annotations

from alembic import op

revision = "0029"
down_revision = "0028"

SUMS = ("usage_hours", "usage_days", "usage_minutes")
COLUMNS = {"num_slo_attained": "num_kept", "num_slo_requests": "num_promised"}
DELETIONS, FORMER_DELETIONS = "tenant_deletions", "erasures"


def upgrade() -> None:
    """Rename the columns and the table. Rows stay as they are."""
    op.rename_table(FORMER_DELETIONS, DELETIONS)
    for table in SUMS:
        for present, former in COLUMNS.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {former} TO {present}")


def downgrade() -> None:
    """Restore the former names."""
    for table in SUMS:
        for present, former in COLUMNS.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {present} TO {former}")
    op.rename_table(DELETIONS, FORMER_DELETIONS)
