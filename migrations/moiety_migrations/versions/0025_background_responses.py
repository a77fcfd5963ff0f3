"""Responses that are made in the background: until when the gateway that makes one is known to be alive."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"


def upgrade() -> None:
    """Add the column. Stored responses have ended, which is null."""
    op.add_column("responses", sa.Column("running_until_ms", sa.BigInteger()))


def downgrade() -> None:
    """Drop the column. Responses that are being made stay in progress for their readers until they expire."""
    op.drop_column("responses", "running_until_ms")
