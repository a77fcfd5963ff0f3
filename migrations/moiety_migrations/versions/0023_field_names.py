"""Rename tables and columns to the field's terms: retention jobs and speculative prefill."""

from __future__ import annotations

from alembic import op

from moiety_migrations.stored_names import COLUMNS, TABLES

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Rename them. Rows stay as they are."""
    for present, former in TABLES.items():
        op.rename_table(former, present)
    for table, columns in COLUMNS.items():
        for present, former in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {former} TO {present}")


def downgrade() -> None:
    """Give them their former names again."""
    for table, columns in COLUMNS.items():
        for present, former in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {present} TO {former}")
    for present, former in TABLES.items():
        op.rename_table(present, former)
