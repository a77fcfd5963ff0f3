"""Quotas, their windows, and the leases of gateway processes."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import required_columns

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """Create the three tables, and let rotated keys have the limits of the first."""
    op.add_column("api_keys", sa.Column("root_id", sa.String(32)))
    op.create_table(
        "quotas",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("level", sa.String(16), nullable=False),
        *required_columns(sa.String(32), "scope_id", "kind"),
        sa.Column("cap", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.UniqueConstraint("level", "scope_id", "kind", name="uq_quotas_level_scope_id_kind"),
        sa.CheckConstraint("cap >= 0", name=op.f("ck_quotas_cap_not_negative")),
        sa.CheckConstraint("level IN ('tenant', 'project', 'key')", name=op.f("ck_quotas_level_known")),
    )
    op.create_index("ix_quotas_created_at_id", "quotas", ["created_at", "id"])
    op.create_table(
        "quota_windows",
        sa.Column("quota_id", sa.String(32), primary_key=True),
        sa.Column("start", sa.DateTime(timezone=True), primary_key=True),
        *required_columns(sa.BigInteger(), "granted", "settled"),
        sa.CheckConstraint("settled <= granted", name=op.f("ck_quota_windows_settled_within_granted")),
    )
    op.create_table(
        "quota_leases",
        sa.Column("quota_id", sa.String(32), primary_key=True),
        sa.Column("start", sa.DateTime(timezone=True), primary_key=True),
        sa.Column("replica_id", sa.String(64), primary_key=True),
        *required_columns(sa.BigInteger(), "granted", "settled", "expires_ms"),
        sa.Column("state", sa.String(16), nullable=False),
        sa.CheckConstraint("settled <= granted", name=op.f("ck_quota_leases_settled_within_granted")),
        sa.CheckConstraint("state IN ('live', 'quarantined')", name=op.f("ck_quota_leases_state_known")),
    )
    op.create_index("ix_quota_leases_replica_id", "quota_leases", ["replica_id"])
    op.create_index("ix_quota_leases_state_expires_ms", "quota_leases", ["state", "expires_ms"])


def downgrade() -> None:
    """Drop the tables and columns."""
    op.drop_table("quota_leases")
    op.drop_table("quota_windows")
    op.drop_table("quotas")
    op.drop_column("api_keys", "root_id")
