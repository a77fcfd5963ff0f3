"""Adapters of tenants, and their tensors in parts."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns, required_columns

revision = "0019"
down_revision = "0018"


def upgrade() -> None:
    """Create both tables."""
    op.create_table(
        "adapters",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(256), nullable=False),
        sa.Column("name", sa.String(64), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("config", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        *optional_columns(sa.String(64), "digest", "engine_adapter"),
        *required_columns(sa.BigInteger(), "created_ms", "touched_ms"),
        sa.CheckConstraint("state IN ('uploading', 'ready', 'deleted')", name=op.f("ck_adapters_state_known")),
    )
    op.create_index("ix_adapters_tenant_id_model_name", "adapters", ["tenant_id", "model", "name"], unique=True)
    op.create_index("ix_adapters_state_touched_ms", "adapters", ["state", "touched_ms"])
    op.create_table(
        "adapter_chunks",
        sa.Column("adapter_id", sa.String(32), primary_key=True),
        sa.Column("start", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )


def downgrade() -> None:
    """Drop the tables and their rows."""
    op.drop_table("adapter_chunks")
    op.drop_table("adapters")
