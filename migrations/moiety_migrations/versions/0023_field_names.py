"""Renames of tables and columns to the field's terms: retention jobs and speculative prefill."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.stored_names import COLUMNS, TABLES, VALUES

revision = "0023"
down_revision = "0022"


def upgrade() -> None:
    """Rename the tables and columns. Rows stay as they are."""
    for present, former in TABLES.items():
        op.rename_table(former, present)
    for table, columns in COLUMNS.items():
        for present, former in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {former} TO {present}")
    for table, stored in VALUES.items():
        for column, words in stored.items():
            for present, former in words.items():
                _replace(table, column, former, present)


def downgrade() -> None:
    """Restore the former names."""
    for table, columns in COLUMNS.items():
        for present, former in columns.items():
            op.execute(f"ALTER TABLE {table} RENAME COLUMN {present} TO {former}")
    for present, former in TABLES.items():
        op.rename_table(present, former)


def _replace(table: str, column: str, old: str, new: str) -> None:
    field: sa.ColumnClause[str] = sa.column(column)
    op.execute(sa.update(sa.table(table, field)).where(field == old).values({column: new}))
