"""The opt-in under which contents of requests are stored, so that those of an ended one cannot be read."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0049"
down_revision = "0048"

TABLES = ("content_logging", "request_contents")


def upgrade() -> None:
    """Add the column. Stored contents are those of the present opt-in of their tenants."""
    for table in TABLES:
        op.add_column(table, sa.Column("opt_in_id", sa.String(32), nullable=False, server_default=sa.text("''")))


def downgrade() -> None:
    """Drop it, and the contents of ended opt-ins, which an earlier release would show."""
    present = "SELECT tenant_id FROM content_logging WHERE opt_in_id = request_contents.opt_in_id"
    op.execute(f"DELETE FROM request_contents WHERE tenant_id NOT IN ({present})")
    for table in TABLES:
        op.drop_column(table, "opt_in_id")
