"""End users and tags that clients name, with each usage row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"

_INDEX = "ix_usage_end_user"
_IS_ATTRIBUTED = "end_user IS NOT NULL OR tags IS NOT NULL"


def upgrade() -> None:
    """Add the columns, and an index of the rows that have them. Existing rows have neither.

    PostgreSQL builds the index after the upgrade, while gateways write (`concurrent_indexes.py`).
    """
    op.add_column("usage", sa.Column("end_user", sa.Text()))
    op.add_column("usage", sa.Column("tags", sa.Text()))
    if op.get_context().dialect.name == "sqlite":
        columns = ["tenant_id", "end_user", "started_at"]
        op.create_index(_INDEX, "usage", columns, sqlite_where=sa.text(_IS_ATTRIBUTED))


def downgrade() -> None:
    """Drop them."""
    op.drop_index(_INDEX, "usage", if_exists=True)
    op.drop_column("usage", "tags")
    op.drop_column("usage", "end_user")
