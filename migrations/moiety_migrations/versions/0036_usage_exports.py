"""Daily exports of usage to the object store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0036"
down_revision = "0035"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "usage_exports",
        sa.Column("day", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("format", sa.String(8), primary_key=True),
        sa.Column("object_key", sa.Text(), nullable=False),
        sa.Column("digest", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("num_rows", sa.BigInteger(), nullable=False),
        sa.Column("requests", sa.BigInteger(), nullable=False),
        sa.Column("tokens", sa.BigInteger(), nullable=False),
        sa.Column("cost_nanodollars", sa.BigInteger(), nullable=False),
        sa.Column("exported_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    """Drop it. The exported objects stay."""
    op.drop_table("usage_exports")
