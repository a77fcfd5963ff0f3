"""Speculative prefill per tenant, and its tokens in the usage tables."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.stored_names import former_column

revision = "0020"
down_revision = "0019"

_USED = ("usage", "usage_hours", "usage_days")
_COUNTS = ("speculative_tokens", "speculative_used_tokens")


def upgrade() -> None:
    """Add the columns. Existing tenants have speculative prefill off, and existing rows have no such tokens."""
    switch = former_column("tenants", "speculative_prefill")
    op.add_column("tenants", sa.Column(switch, sa.String(16), nullable=False, server_default="off"))
    for table in _USED:
        for count in _COUNTS:
            column = sa.Column(former_column(table, count), sa.BigInteger(), nullable=False, server_default="0")
            op.add_column(table, column)


def downgrade() -> None:
    """Drop the columns."""
    for table in _USED:
        for count in _COUNTS:
            op.drop_column(table, former_column(table, count))
    op.drop_column("tenants", former_column("tenants", "speculative_prefill"))
