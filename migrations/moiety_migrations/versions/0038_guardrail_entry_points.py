"""Memory of the processes of guardrails that are Python entry points."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0038"
down_revision = "0037"


def upgrade() -> None:
    """Add the column."""
    op.add_column("guardrails", sa.Column("memory_mb", sa.Integer(), nullable=False, server_default=sa.text("512")))


def downgrade() -> None:
    """Drop it, and the guardrails that are entry points."""
    op.execute("DELETE FROM guardrails WHERE url LIKE 'python:%'")
    op.drop_column("guardrails", "memory_mb")
