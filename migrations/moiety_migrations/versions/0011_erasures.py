"""Erasures of tenants' data, and an audit log whose entries hash what may be erased by a digest."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

COLUMNS = ("version", "salt", "digest", "erased_at")


def upgrade() -> None:
    """Entries that there are keep version 1, and verify as they did."""
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
    """Take them away again. Entries of version 2, and those that were erased, verify no more without them."""
    for column in reversed(COLUMNS):
        op.drop_column("audit_log", column)
    op.drop_table("erasures")
