"""Whether a tenant's next turns may be computed ahead, and the tokens of that in what was used."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

_USED = ("usage", "usage_hours", "usage_days")
_COUNTS = ("foreseen_tokens", "foreseen_used_tokens")


def upgrade() -> None:
    """Nothing is computed ahead for the tenants that there are, and nothing was."""
    op.add_column("tenants", sa.Column("foresight", sa.String(16), nullable=False, server_default="off"))
    for name in _USED:
        for count in _COUNTS:
            op.add_column(name, sa.Column(count, sa.BigInteger(), nullable=False, server_default="0"))


def downgrade() -> None:
    """Take it away again."""
    for name in _USED:
        for count in _COUNTS:
            op.drop_column(name, count)
    op.drop_column("tenants", "foresight")
