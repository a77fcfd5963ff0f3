"""Service classes, and the SLO outcome of each request."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns

revision = "0002"
down_revision = "0001"

SHIPPED = ("priority", "standard", "flex", "batch")
FOREIGN_KEY = "fk_tenants_service_class_service_classes"


def upgrade() -> None:
    """Create the table with the four built-in classes, reference it from tenants, and widen the usage rows."""
    classes = op.create_table(
        "service_classes",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("weight", sa.Double(), nullable=False),
        sa.Column("ttft_s", sa.Double()),
        sa.Column("ttft_per_1k_s", sa.Double(), nullable=False),
        *optional_columns(sa.Double(), "tpot_s", "completion_s"),
        sa.Column("max_queue_s", sa.Double(), nullable=False),
        sa.Column("preemptible", sa.Boolean(), nullable=False),
        sa.Column("on_overload", sa.String(16), nullable=False),
        sa.Column("price_factor", sa.Double(), nullable=False),
        sa.Column("downgrade_to", sa.String(32)),
        sa.ForeignKeyConstraint(
            ["downgrade_to"], ["service_classes.name"], name="fk_service_classes_downgrade_to_service_classes"
        ),
        sa.CheckConstraint(
            "on_overload IN ('reject', 'queue', 'downgrade')", name=op.f("ck_service_classes_on_overload_known")
        ),
        sa.CheckConstraint(
            "on_overload <> 'downgrade' OR downgrade_to IS NOT NULL",
            name=op.f("ck_service_classes_downgrade_has_target"),
        ),
        sa.CheckConstraint(
            "ttft_s IS NOT NULL OR completion_s IS NOT NULL", name=op.f("ck_service_classes_promises_something")
        ),
    )
    op.bulk_insert(
        classes,
        [
            _row("priority", 0, ttft_s=0.5, ttft_per_1k_s=0.1, tpot_s=0.033, max_queue_s=5.0, preemptible=False),
            _row("standard", 1, ttft_s=2.0, ttft_per_1k_s=0.2, tpot_s=0.1, max_queue_s=30.0),
            _row("flex", 2, completion_s=600.0, max_queue_s=300.0, on_overload="queue", price_factor=0.5),
            _row("batch", 3, completion_s=86400.0, max_queue_s=3600.0, on_overload="queue", price_factor=0.5),
        ],
    )
    with op.batch_alter_table("tenants", table_args=_tenant_checks()) as tenants:
        tenants.create_foreign_key(FOREIGN_KEY, "service_classes", ["service_class"], ["name"])
    op.add_column("usage", sa.Column("num_preemptions", sa.Integer(), nullable=False, server_default="0"))
    op.add_column("usage", sa.Column("sla_attained", sa.Boolean()))


def downgrade() -> None:
    """Drop the table and columns. Tenants of classes that the earlier schema does not know become standard."""
    op.drop_column("usage", "sla_attained")
    op.drop_column("usage", "num_preemptions")
    with op.batch_alter_table("tenants", table_args=_tenant_checks()) as tenants:
        tenants.drop_constraint(FOREIGN_KEY, type_="foreignkey")
    op.execute(f"UPDATE tenants SET service_class = 'standard' WHERE service_class NOT IN {SHIPPED}")
    op.drop_table("service_classes")


def _row(name: str, rank: int, **fields: object) -> dict[str, object]:
    usual = {
        "weight": 1.0,
        "ttft_s": None,
        "ttft_per_1k_s": 0.0,
        "tpot_s": None,
        "completion_s": None,
        "preemptible": True,
        "on_overload": "reject",
        "price_factor": 1.0,
        "downgrade_to": None,
    }
    return {"name": name, "rank": rank, **usual, **fields}


def _tenant_checks() -> tuple[sa.CheckConstraint, ...]:
    """Return the checks of tenants; SQLite recreates the table, and its reflected definition lacks them."""
    if op.get_bind().dialect.name != "sqlite":
        return ()
    return (
        sa.CheckConstraint("weight > 0", name=op.f("ck_tenants_weight_positive")),
        sa.CheckConstraint("status IN ('active', 'suspended')", name=op.f("ck_tenants_status_known")),
    )
