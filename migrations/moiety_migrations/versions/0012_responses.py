"""Responses that are stored at the request's demand."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0012"
down_revision = "0011"


def upgrade() -> None:
    """Create the table."""
    op.create_table(
        "responses",
        sa.Column("id", sa.String(40), primary_key=True),
        *required_columns(sa.String(32), "tenant_id", "project_id"),
        sa.Column("model", sa.String(512), nullable=False),
        sa.Column("previous_id", sa.String(40)),
        sa.Column("num_items", sa.Integer(), nullable=False),
        *required_columns(sa.BigInteger(), "num_bytes", "total_bytes", "expires_ms"),
        *required_columns(sa.LargeBinary(), "items", "body"),
    )
    op.create_index("ix_responses_tenant_id_num_bytes", "responses", ["tenant_id", "num_bytes"])
    op.create_index("ix_responses_expires_ms", "responses", ["expires_ms"])


def downgrade() -> None:
    """Drop the table and its rows."""
    op.drop_table("responses")
