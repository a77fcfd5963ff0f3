"""Bytes of experts that requests read and moved, in the usage tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0032"
down_revision = "0031"

_SUMS = ("usage_hours", "usage_days")
_COLUMNS = ("expert_read_bytes", "expert_moved_bytes")


def upgrade() -> None:
    """Add the columns; existing rows have 0. Sums are wider, since a month's may exceed 64 bits."""
    wide = sa.BigInteger().with_variant(sa.Numeric(38, 0), "postgresql")
    for table, kind in (("usage", sa.BigInteger()), *((name, wide) for name in _SUMS)):
        for name in _COLUMNS:
            op.add_column(table, sa.Column(name, kind, nullable=False, server_default="0"))


def downgrade() -> None:
    """Drop the columns."""
    for table in ("usage", *_SUMS):
        for name in _COLUMNS:
            op.drop_column(table, name)
