"""Times at which the tokens of developers by groups last gave them their role, and at which they ended it."""

from __future__ import annotations

from datetime import UTC, datetime

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns

revision = "0053"
down_revision = "0052"

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Add the columns. Developers by groups count as seen now, so that their keys stay valid."""
    with op.batch_alter_table("users") as table:
        for column in optional_columns(_TIME, "role_seen_at", "role_ended_at"):
            table.add_column(column)
    users = sa.table(
        "users", *(sa.column(name, _TIME) for name in ("role_seen_at", "accepted_at")), sa.column("subject")
    )
    by_token = users.c.subject.is_not(None) & users.c.accepted_at.is_(None)
    op.execute(users.update().where(by_token).values(role_seen_at=datetime.now(UTC)))


def downgrade() -> None:
    """Drop them."""
    with op.batch_alter_table("users") as table:
        for name in ("role_ended_at", "role_seen_at"):
            table.drop_column(name)
