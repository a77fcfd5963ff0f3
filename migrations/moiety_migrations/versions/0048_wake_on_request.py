"""Requests that wait for sleeping engines, the gateway that wakes them, and measured wake times."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0048"
down_revision = "0047"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "wake_demands",
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("owner", sa.String(64), primary_key=True),
        sa.Column("num_waiting", sa.Integer(), nullable=False),
        sa.Column("slo_ms", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "wake_leases",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("owner", sa.String(64), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
    )
    op.create_table(
        "wake_times",
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("wake_ms", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    """Drop them."""
    op.drop_table("wake_times")
    op.drop_table("wake_leases")
    op.drop_table("wake_demands")
