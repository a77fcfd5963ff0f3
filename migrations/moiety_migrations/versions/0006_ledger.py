"""The ledger, and hourly usage sums."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import key_columns, required_columns

revision = "0006"
down_revision = "0005"

_TOTALS = ("prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars")


def upgrade() -> None:
    """Create the two tables, and enter the earlier usage."""
    op.create_table(
        "ledger",
        sa.Column("request_id", sa.Text(), primary_key=True),
        sa.Column("kind", sa.String(16), primary_key=True),
        sa.Column("sequence", sa.Integer(), primary_key=True, autoincrement=False),
        sa.Column("tenant_id", sa.Text(), nullable=False),
        sa.Column("started_at", sa.DateTime(timezone=True), nullable=False),
        *required_columns(sa.BigInteger(), *_TOTALS),
    )
    op.create_index("ix_ledger_tenant_id_started_at", "ledger", ["tenant_id", "started_at"])
    op.create_table(
        "usage_hours",
        sa.Column("hour", sa.DateTime(timezone=True), primary_key=True),
        *key_columns(sa.Text(), "tenant_id", "project_id", "key_id", "model", "service_class"),
        *required_columns(sa.BigInteger(), "requests", "failed", "rejected", "disconnected", *_TOTALS[:3]),
        sa.Column("ttft_ms", sa.Double(), nullable=False),
        sa.Column("num_ttft", sa.BigInteger(), nullable=False),
        sa.Column("duration_ms", sa.Double(), nullable=False),
        *required_columns(sa.BigInteger(), "preemptions", "cost_nanodollars", "num_kept", "num_promised"),
    )
    totals = ", ".join(_TOTALS)
    op.execute(
        f"INSERT INTO ledger (request_id, kind, sequence, tenant_id, started_at, {totals}) "
        f"SELECT request_id, 'settled', 0, tenant_id, started_at, {totals} FROM usage"
    )
    hour = "date_trunc('hour', started_at)"
    if op.get_bind().dialect.name == "sqlite":
        hour = "strftime('%Y-%m-%d %H:00:00.000000', started_at)"
    keys = "tenant_id, project_id, key_id, model, service_class"
    op.execute(
        f"INSERT INTO usage_hours (hour, {keys}, requests, failed, rejected, disconnected, prompt_tokens, "
        "cached_tokens, output_tokens, ttft_ms, num_ttft, duration_ms, preemptions, cost_nanodollars, num_kept, "
        f"num_promised) SELECT {hour}, {keys}, count(*), "
        "sum(CASE WHEN outcome = 'failed' THEN 1 ELSE 0 END), "
        "sum(CASE WHEN outcome = 'rejected' THEN 1 ELSE 0 END), "
        "sum(CASE WHEN outcome = 'disconnected' THEN 1 ELSE 0 END), "
        "sum(prompt_tokens), sum(cached_tokens), sum(output_tokens), coalesce(sum(ttft_ms), 0), count(ttft_ms), "
        "sum(duration_ms), sum(num_preemptions), sum(cost_nanodollars), "
        "sum(CASE WHEN sla_attained THEN 1 ELSE 0 END), count(sla_attained) "
        f"FROM usage GROUP BY {hour}, {keys}"
    )


def downgrade() -> None:
    """Drop the tables."""
    op.drop_table("usage_hours")
    op.drop_table("ledger")
