"""Prices, the cost of each request, and token buckets of rate limits."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """Create the two tables; earlier usage has no cost."""
    op.add_column("usage", sa.Column("cost_nanodollars", sa.BigInteger(), server_default="0", nullable=False))
    op.create_table(
        "prices",
        sa.Column("model", sa.String(256), primary_key=True),
        sa.Column("service_class", sa.String(32), primary_key=True),
        *required_columns(sa.BigInteger(), "input", "cached_input", "output"),
        sa.CheckConstraint("input >= 0 AND output >= 0", name=op.f("ck_prices_not_negative")),
        sa.CheckConstraint("cached_input >= 0 AND cached_input <= input", name=op.f("ck_prices_cached_not_dearer")),
    )
    op.create_table(
        "quota_rates",
        sa.Column("quota_id", sa.String(32), primary_key=True),
        *required_columns(sa.BigInteger(), "debt", "at_ms"),
    )


def downgrade() -> None:
    """Drop the tables and columns."""
    op.drop_table("quota_rates")
    op.drop_table("prices")
    op.drop_column("usage", "cost_nanodollars")
