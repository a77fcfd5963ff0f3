"""Spot classes: the bounds of their price, published prices, and the percentage that each request paid."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_count, required_ms, text_key

revision = "0046"
down_revision = "0044"


def upgrade() -> None:
    """Add the columns and the table. Existing classes have a fixed price."""
    op.add_column("service_classes", sa.Column("spot_floor_percent", sa.Integer()))
    op.add_column("service_classes", sa.Column("spot_ceiling_percent", sa.Integer()))
    op.add_column("usage", sa.Column("spot_percent", sa.Integer()))
    op.create_table(
        "spot_prices",
        text_key("model", 256),
        text_key("service_class", 32),
        sa.Column("starts_ms", sa.BigInteger(), primary_key=True, autoincrement=False),
        required_ms("ends_ms"),
        required_count("percent"),
        required_count("idle_percent"),
        sa.CheckConstraint("percent BETWEEN 1 AND 100", name=op.f("ck_spot_prices_percent_in_range")),
    )
    op.create_index("ix_spot_prices_ends_ms", "spot_prices", ["ends_ms"])


def downgrade() -> None:
    """Drop them. Spot classes become classes with a fixed price."""
    op.drop_table("spot_prices")
    op.drop_column("usage", "spot_percent")
    op.drop_column("service_classes", "spot_ceiling_percent")
    op.drop_column("service_classes", "spot_floor_percent")
