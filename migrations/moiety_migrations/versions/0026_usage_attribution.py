"""End users and tags that clients name, with each usage row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None

_IS_ATTRIBUTED = "end_user IS NOT NULL OR tags IS NOT NULL"


def upgrade() -> None:
    """Add the columns, and an index of the rows that have them. Existing rows have neither."""
    op.add_column("usage", sa.Column("end_user", sa.Text()))
    op.add_column("usage", sa.Column("tags", sa.Text()))
    op.create_index(
        "ix_usage_end_user",
        "usage",
        ["tenant_id", "end_user", "started_at"],
        sqlite_where=sa.text(_IS_ATTRIBUTED),
        postgresql_where=sa.text(_IS_ATTRIBUTED),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_usage_end_user", "usage")
    op.drop_column("usage", "tags")
    op.drop_column("usage", "end_user")
