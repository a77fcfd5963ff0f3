"""Routes, and the route of each usage row."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0034"
down_revision = "0033"


def upgrade() -> None:
    """Create the table, and add the column; existing rows have no route."""
    op.create_table(
        "routes",
        sa.Column("name", sa.String(256), primary_key=True),
        *required_columns(sa.Text(), "targets", "fallbacks"),
        sa.Column("sticky", sa.String(16), nullable=False),
        sa.Column("downgrade_model", sa.String(256)),
        sa.Column("downgrade_percent", sa.Integer()),
        sa.Column("shadow_model", sa.String(256)),
        sa.Column("shadow_percent", sa.Double()),
        sa.CheckConstraint("sticky IN ('none', 'tenant', 'conversation')", name=op.f("ck_routes_sticky_known")),
        sa.CheckConstraint(
            "(downgrade_model IS NULL) = (downgrade_percent IS NULL)", name=op.f("ck_routes_downgrade_complete")
        ),
        sa.CheckConstraint("(shadow_model IS NULL) = (shadow_percent IS NULL)", name=op.f("ck_routes_shadow_complete")),
    )
    op.add_column("usage", sa.Column("route", sa.Text()))


def downgrade() -> None:
    """Drop both."""
    op.drop_column("usage", "route")
    op.drop_table("routes")
