"""Signed receipts: the chain of each tenant, its receipts, and the public keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "receipt_chains",
        sa.Column("tenant_id", sa.String(32), primary_key=True),
        sa.Column("num_receipts", sa.BigInteger(), nullable=False),
        sa.Column("head", sa.String(64), nullable=False),
    )
    op.create_table(
        "receipts",
        sa.Column("tenant_id", sa.String(32), primary_key=True),
        sa.Column("sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("hash", sa.String(64), nullable=False),
        sa.Column("content", sa.Text()),
        sa.Column("salt", sa.String(64)),
    )
    op.create_index("ix_receipts_tenant_id_request_id", "receipts", ["tenant_id", "request_id"], unique=True)
    op.create_table(
        "receipt_keys",
        sa.Column("key_id", sa.String(16), primary_key=True),
        sa.Column("public_key", sa.String(64), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
    )


def downgrade() -> None:
    """Drop them. Receipts that were delivered can be verified with a copy of the public keys."""
    op.drop_table("receipt_keys")
    op.drop_table("receipts")
    op.drop_table("receipt_chains")
