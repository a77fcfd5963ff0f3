"""Users, the user of a key, and what developers of a tenant may make."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import (
    object_id,
    optional_text,
    required_count,
    required_json,
    required_text,
    required_time,
    tenant_key,
)

revision = "0042"
down_revision = "0041"

OF_DEPLOYMENT = sa.text("tenant_id IS NULL")


def upgrade() -> None:
    """Create the tables, and add the user of a key."""
    op.create_table(
        "users",
        object_id(),
        required_text("email", 254),
        required_text("name", 100),
        required_text("role", 16),
        optional_text("tenant_id", 32),
        sa.Column("project_ids", sa.JSON()),
        required_text("state", 16),
        optional_text("issuer", 500),
        optional_text("subject", 255),
        sa.Column("invitation_hash", sa.LargeBinary()),
        sa.Column("invitation_expires_at", sa.DateTime(timezone=True)),
        required_time("created_at"),
        sa.Column("accepted_at", sa.DateTime(timezone=True)),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_users_tenant_id_tenants"),
        sa.UniqueConstraint("tenant_id", "email", name="uq_users_tenant_id_email"),
        sa.CheckConstraint("state IN ('invited', 'active', 'disabled')", name=op.f("ck_users_state_known")),
        sa.CheckConstraint(
            "role IN ('owner', 'operator', 'tenant-admin', 'viewer', 'developer')", name=op.f("ck_users_role_known")
        ),
    )
    op.create_index(
        "ix_users_deployment_email",
        "users",
        ["email"],
        unique=True,
        sqlite_where=OF_DEPLOYMENT,
        postgresql_where=OF_DEPLOYMENT,
    )
    op.create_index("ix_users_issuer_subject", "users", ["issuer", "subject"])
    op.create_index("ix_users_tenant_id_issuer_subject", "users", ["tenant_id", "issuer", "subject"], unique=True)
    op.create_index(
        "ix_users_deployment_subject",
        "users",
        ["issuer", "subject"],
        unique=True,
        sqlite_where=OF_DEPLOYMENT,
        postgresql_where=OF_DEPLOYMENT,
    )
    op.create_index("ix_users_created_at_id", "users", ["created_at", "id"])
    op.create_table(
        "key_policies",
        tenant_key(),
        sa.Column("makes_keys", sa.Boolean(), nullable=False),
        required_count("max_keys"),
        sa.Column("max_days", sa.Integer()),
        sa.Column("allowed_models", sa.JSON()),
        required_json("limits"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_key_policies_tenant_id_tenants"),
    )
    op.add_column("api_keys", optional_text("user_id", 32))
    op.create_index("ix_api_keys_user_id", "api_keys", ["user_id"])


def downgrade() -> None:
    """Drop them. Keys of users are revoked: an earlier release would accept those of a disabled user."""
    op.execute("UPDATE api_keys SET revoked_at = CURRENT_TIMESTAMP WHERE user_id IS NOT NULL AND revoked_at IS NULL")
    op.drop_index("ix_api_keys_user_id", "api_keys")
    op.drop_column("api_keys", "user_id")
    op.drop_table("key_policies")
    op.drop_table("users")
