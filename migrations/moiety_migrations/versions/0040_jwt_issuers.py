"""Issuers of JWTs, and the keys as which their tokens act."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_text, required_count, required_json, required_text, text_key

revision = "0040"
down_revision = "0039"


def upgrade() -> None:
    """Create the tables."""
    op.create_table(
        "jwt_issuers",
        text_key("name", 64),
        required_text("url", 500),
        required_text("audience", 500),
        optional_text("jwks_url", 1000),
        sa.Column("jwks", sa.Text()),
        optional_text("claim", 128),
        required_json("required_claims"),
        optional_text("end_user_claim", 128),
        sa.Column("service_class", sa.String(32), sa.ForeignKey("service_classes.name")),
        sa.Column("models", sa.JSON()),
        sa.UniqueConstraint("url", "audience", name="uq_jwt_issuers_url_audience"),
    )
    op.create_table(
        "jwt_grants",
        sa.Column("issuer_name", sa.String(64), sa.ForeignKey("jwt_issuers.name"), primary_key=True),
        text_key("claim_value", 200),
        required_count("position"),
        sa.Column("key_id", sa.String(32), sa.ForeignKey("api_keys.id"), nullable=False),
        sa.Column("tenant_id", sa.String(32), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("models", sa.JSON()),
    )
    op.create_index("ix_jwt_grants_tenant_id", "jwt_grants", ["tenant_id"])
    op.create_index("ix_jwt_grants_key_id", "jwt_grants", ["key_id"], unique=True)


def downgrade() -> None:
    """Drop them, and revoke their keys, which nothing uses any more."""
    op.execute(
        "UPDATE api_keys SET revoked_at = CURRENT_TIMESTAMP "
        "WHERE revoked_at IS NULL AND id IN (SELECT key_id FROM jwt_grants)"
    )
    op.drop_table("jwt_grants")
    op.drop_table("jwt_issuers")
