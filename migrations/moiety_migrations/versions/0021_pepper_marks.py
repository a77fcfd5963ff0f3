"""Pepper mark of each key: the pepper of its hash, so that the pepper can be replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"


def upgrade() -> None:
    """Add the column. The mark of an existing key is written at its next use."""
    op.add_column("api_keys", sa.Column("pepper_mark", sa.String(16)))


def downgrade() -> None:
    """Drop the column."""
    op.drop_column("api_keys", "pepper_mark")
