"""Tenants, projects, keys and usage."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns, required_columns

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Create the four tables."""
    moment = sa.DateTime(timezone=True)
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("service_class", sa.String(32), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.UniqueConstraint("name", name="uq_tenants_name"),
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status_known")),
    )
    op.create_index("ix_tenants_created_at_id", "tenants", ["created_at", "id"])
    op.create_table(
        "projects",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("tenant_id", sa.String(32), nullable=False),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("created_at", moment, nullable=False),
        sa.UniqueConstraint("tenant_id", "name", name="uq_projects_tenant_id_name"),
        sa.ForeignKeyConstraint(["tenant_id"], ["tenants.id"], name="fk_projects_tenant_id_tenants"),
    )
    op.create_index("ix_projects_created_at_id", "projects", ["created_at", "id"])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(32), primary_key=True),
        sa.Column("project_id", sa.String(32)),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("secret_hash", sa.LargeBinary(), nullable=False),
        sa.Column("hint", sa.String(8), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("allowed_models", sa.JSON()),
        sa.Column("created_at", moment, nullable=False),
        *optional_columns(moment, "expires_at", "revoked_at"),
        sa.Column("replaced_by", sa.String(32)),
        sa.ForeignKeyConstraint(["project_id"], ["projects.id"], name="fk_api_keys_project_id_projects"),
    )
    op.create_index("ix_api_keys_project_id", "api_keys", ["project_id"])
    op.create_index("ix_api_keys_created_at_id", "api_keys", ["created_at", "id"])
    _create_usage(moment)


def _create_usage(moment: sa.DateTime) -> None:
    op.create_table(
        "usage",
        sa.Column("request_id", sa.Text(), primary_key=True),
        *required_columns(sa.Text(), "tenant_id", "project_id", "key_id", "endpoint", "model", "service_class"),
        sa.Column("started_at", moment, nullable=False),
        sa.Column("outcome", sa.Text(), nullable=False),
        *required_columns(sa.Integer(), "http_status", "num_choices"),
        *required_columns(sa.BigInteger(), "prompt_tokens", "cached_tokens", "output_tokens"),
        *optional_columns(sa.Double(), "queue_ms", "ttft_ms"),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        sa.Column("error_code", sa.Text()),
    )
    for first, second in (
        ("started_at", "request_id"),
        ("tenant_id", "started_at"),
        ("project_id", "started_at"),
        ("key_id", "started_at"),
    ):
        op.create_index(f"ix_usage_{first}_{second}", "usage", [first, second])


def downgrade() -> None:
    """Drop the tables."""
    for table in ("usage", "api_keys", "projects", "tenants"):
        op.drop_table(table)
