"""Simulations: the running one, and the results of the last ones."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "simulations",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("slot", sa.SmallInteger()),
        sa.Column("state", sa.String(16), nullable=False),
        *required_columns(sa.BigInteger(), "created_ms", "alive_ms"),
        sa.Column("settings", sa.JSON(), nullable=False),
        sa.Column("result", sa.JSON()),
        sa.Column("problem", sa.Text()),
        sa.UniqueConstraint("slot", name="uq_simulations_slot"),
    )
    op.create_index("ix_simulations_created_ms_id", "simulations", ["created_ms", "id"])


def downgrade() -> None:
    """Drop the table."""
    op.drop_table("simulations")
