"""Conversations with their items, the conversation of a response, and the events of streamed background responses."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0028"
down_revision = "0026"


def upgrade() -> None:
    """Create the tables, and add the columns. Existing responses are in no conversation and have no stored events."""
    op.create_table(
        "conversations",
        sa.Column("id", sa.String(40), primary_key=True),
        *required_columns(sa.String(32), "tenant_id", "project_id"),
        *required_columns(sa.Text(), "models", "labels"),
        *required_columns(sa.BigInteger(), "created_ms", "expires_ms", "next_position"),
        sa.Column("num_items", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
    )
    op.create_index("ix_conversations_tenant_id_num_bytes", "conversations", ["tenant_id", "num_bytes"])
    op.create_index("ix_conversations_expires_ms", "conversations", ["expires_ms"])
    op.create_table(
        "conversation_items",
        sa.Column(
            "conversation_id", sa.String(40), sa.ForeignKey("conversations.id", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("position", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("item_id", sa.String(64), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("item", sa.LargeBinary(), nullable=False),
    )
    op.create_index(
        "ix_conversation_items_conversation_id_item_id",
        "conversation_items",
        ["conversation_id", "item_id"],
        unique=True,
    )
    op.create_index("ix_conversation_items_tenant_id", "conversation_items", ["tenant_id"])
    op.create_table(
        "response_events",
        sa.Column("response_id", sa.String(40), sa.ForeignKey("responses.id", ondelete="CASCADE"), primary_key=True),
        sa.Column("first_number", sa.BigInteger(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("num_events", sa.Integer(), nullable=False),
        sa.Column("events", sa.LargeBinary(), nullable=False),
    )
    op.create_index("ix_response_events_tenant_id", "response_events", ["tenant_id"])
    op.add_column("responses", sa.Column("conversation_id", sa.String(40)))
    op.add_column("responses", sa.Column("conversation_position", sa.BigInteger()))
    op.add_column("responses", sa.Column("num_events", sa.BigInteger()))


def downgrade() -> None:
    """Drop them. The context of responses in conversations is lost."""
    for column in ("num_events", "conversation_position", "conversation_id"):
        op.drop_column("responses", column)
    op.drop_table("response_events")
    op.drop_table("conversation_items")
    op.drop_table("conversations")
