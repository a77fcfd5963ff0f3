"""Quotes and credits: the terms of classes, and guarantees, predictions and credits in the usage tables."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"

_SUMS = ("usage_hours", "usage_days")
_COUNTS = ("credit_nanodollars", "num_guarantees", "num_guarantees_met")
_OF_REQUEST = ("guarantee_met", "predicted_ttft_ms", "predicted_duration_ms", "credit_reason")


def upgrade() -> None:
    """Add the columns. Classes grant no credit, and existing rows have neither a guarantee nor a credit."""
    zero: dict[str, Any] = {"nullable": False, "server_default": "0"}
    op.add_column("service_classes", sa.Column("credit_percent", sa.Integer(), **zero))
    op.add_column("usage", sa.Column("guarantee_met", sa.Boolean()))
    op.add_column("usage", sa.Column("predicted_ttft_ms", sa.Double()))
    op.add_column("usage", sa.Column("predicted_duration_ms", sa.Double()))
    op.add_column("usage", sa.Column("credit_nanodollars", sa.BigInteger(), **zero))
    op.add_column("usage", sa.Column("credit_reason", sa.String(16)))
    op.add_column("usage_cuts", sa.Column("credit_nanodollars", sa.BigInteger(), **zero))
    for table in _SUMS:
        for name in _COUNTS:
            op.add_column(table, sa.Column(name, sa.BigInteger(), **zero))


def downgrade() -> None:
    """Drop the columns. Credits stay in the ledger, and costs stay reduced by them."""
    for table in _SUMS:
        for name in _COUNTS:
            op.drop_column(table, name)
    op.drop_column("usage_cuts", "credit_nanodollars")
    op.drop_column("usage", "credit_nanodollars")
    for name in _OF_REQUEST:
        op.drop_column("usage", name)
    op.drop_column("service_classes", "credit_percent")
