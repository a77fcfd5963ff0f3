"""Answers stored under Idempotency-Keys."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0009"
down_revision = "0008"


def upgrade() -> None:
    """Create the two tables."""
    op.create_table(
        "idempotent_requests",
        sa.Column("tenant_id", sa.String(32), primary_key=True),
        sa.Column("key_hash", sa.LargeBinary(), primary_key=True),
        sa.Column("fingerprint", sa.LargeBinary(), nullable=False),
        sa.Column("claim_id", sa.String(32), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        *required_columns(sa.BigInteger(), "expires_ms", "num_bytes"),
        sa.Column("status", sa.Integer()),
        sa.Column("headers", sa.JSON()),
        sa.Column("body", sa.LargeBinary()),
        sa.CheckConstraint("state IN ('running', 'kept', 'not_kept')", name=op.f("ck_idempotent_requests_state_known")),
    )
    op.create_index("ix_idempotent_requests_claim_id", "idempotent_requests", ["claim_id"], unique=True)
    op.create_index("ix_idempotent_requests_expires_ms", "idempotent_requests", ["expires_ms"])
    op.create_table(
        "idempotency_tenants",
        sa.Column("tenant_id", sa.String(32), primary_key=True),
        *required_columns(sa.BigInteger(), "num_keys", "num_bytes"),
    )


def downgrade() -> None:
    """Drop the tables and their rows."""
    op.drop_table("idempotency_tenants")
    op.drop_table("idempotent_requests")
