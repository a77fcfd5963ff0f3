"""Signed receipts: the chain of each tenant, its receipts, and the public keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_text, required_ms, required_text, tenant_key, text_key

revision = "0047"
down_revision = "0046"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "receipt_chains",
        tenant_key(),
        sa.Column("num_receipts", sa.BigInteger(), nullable=False),
        required_text("head", 64),
    )
    op.create_table(
        "receipts",
        tenant_key(),
        sa.Column("sequence", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("request_id", sa.Text(), nullable=False),
        required_text("project_id", 32),
        required_text("hash", 64),
        sa.Column("content", sa.Text()),
        optional_text("salt", 64),
    )
    op.create_index("ix_receipts_tenant_id_request_id", "receipts", ["tenant_id", "request_id"], unique=True)
    op.create_table(
        "receipt_keys",
        text_key("key_id", 16),
        required_text("public_key", 64),
        required_ms("created_ms"),
    )


def downgrade() -> None:
    """Drop them. Receipts that were delivered can be verified with a copy of the public keys."""
    op.drop_table("receipt_keys")
    op.drop_table("receipts")
    op.drop_table("receipt_chains")
