"""End users of batches that a JWT created."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0041"
down_revision = "0040"


def upgrade() -> None:
    """Add the column."""
    op.add_column("batches", sa.Column("end_user", sa.String(256)))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("batches", "end_user")
