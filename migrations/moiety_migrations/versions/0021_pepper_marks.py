"""By which pepper the hash of each key was made, so that the pepper can be replaced."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Of the keys that there are it is written down when they are next used."""
    op.add_column("api_keys", sa.Column("pepper_mark", sa.String(16)))


def downgrade() -> None:
    """Take it away again."""
    op.drop_column("api_keys", "pepper_mark")
