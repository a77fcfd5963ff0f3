"""Responses that are stored at the request's demand."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "responses",
        sa.Column("id", sa.String(40), primary_key=True),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("project_id", sa.String(32), nullable=False),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("previous_id", sa.String(40)),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("total_bytes", sa.BigInteger(), nullable=False),
        sa.Column("expires_ms", sa.BigInteger(), nullable=False),
        sa.Column("items", sa.LargeBinary(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_responses_tenant_id_num_bytes", "responses", ["tenant_id", "num_bytes"])
    op.create_index("ix_responses_expires_ms", "responses", ["expires_ms"])


def downgrade() -> None:
    """Drop the table and its rows."""
    op.drop_table("responses")
