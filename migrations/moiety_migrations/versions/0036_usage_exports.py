"""Daily exports of usage to the object store."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

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
        *required_columns(sa.BigInteger(), "num_bytes", "num_rows", "requests", "tokens", "cost_nanodollars"),
        sa.Column("exported_at", sa.DateTime(timezone=True), nullable=False),
    )


def downgrade() -> None:
    """Drop it. The exported objects stay."""
    op.drop_table("usage_exports")
