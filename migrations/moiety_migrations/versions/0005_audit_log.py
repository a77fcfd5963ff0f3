"""The log of administrative changes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    """Create the table. Earlier changes are not in it."""
    op.create_table(
        "audit_log",
        sa.Column("seq", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("actor", sa.String(64), nullable=False),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("object_kind", sa.String(32), nullable=False),
        sa.Column("object_id", sa.String(300), nullable=False),
        *optional_columns(sa.JSON(), "before", "after"),
        sa.Column("hash", sa.String(64), nullable=False),
    )
    op.create_index("ix_audit_log_object_id", "audit_log", ["object_id"])


def downgrade() -> None:
    """Drop the table and its entries."""
    op.drop_table("audit_log")
