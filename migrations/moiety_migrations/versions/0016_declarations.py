"""Objects declared in files (declarative configuration)."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"


def upgrade() -> None:
    """Create the table. Existing objects count as made by hand."""
    op.create_table(
        "declarations",
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("name", sa.String(700), primary_key=True),
        sa.Column("source", sa.String(64), nullable=False),
        sa.Column("object_id", sa.String(700)),
        sa.Column("tenant_id", sa.String(32)),
    )


def downgrade() -> None:
    """Drop the table; declared objects then count as made by hand."""
    op.drop_table("declarations")
