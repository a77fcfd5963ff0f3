"""Tenant data deletion, and audit log entries that hash erasable data by a digest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"

COLUMNS = ("version", "salt", "digest", "erased_at")


def upgrade() -> None:
    """Add the tables and columns. Existing entries keep version 1, and still verify."""
    op.create_table(
        "erasures",
        sa.Column("tenant_id", sa.String(32), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("begun_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("ended_at", sa.DateTime(timezone=True)),
        sa.Column("counts", sa.JSON(), nullable=False),
    )
    op.add_column("audit_log", sa.Column("version", sa.SmallInteger(), nullable=False, server_default="1"))
    op.add_column("audit_log", sa.Column("salt", sa.String(32)))
    op.add_column("audit_log", sa.Column("digest", sa.String(64)))
    op.add_column("audit_log", sa.Column("erased_at", sa.DateTime(timezone=True)))


def downgrade() -> None:
    """Drop the tables and columns. Entries of version 2, and erased entries, no longer verify."""
    for column in reversed(COLUMNS):
        op.drop_column("audit_log", column)
    op.drop_table("erasures")
