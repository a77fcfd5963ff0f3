"""The response that has locked a conversation, and until when."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0030"
down_revision = "0029"


def upgrade() -> None:
    """Add the columns. No conversation is locked."""
    op.add_column("conversations", sa.Column("locked_by", sa.String(40)))
    op.add_column("conversations", sa.Column("locked_until_ms", sa.BigInteger()))


def downgrade() -> None:
    """Drop them."""
    for column in ("locked_until_ms", "locked_by"):
        op.drop_column("conversations", column)
