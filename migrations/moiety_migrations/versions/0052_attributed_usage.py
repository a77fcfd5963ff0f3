"""Usage sums by end user and tags, so that a report by them costs no more than its groups and the last hours."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op
from sqlalchemy.types import TypeEngine

from moiety_migrations.columns import key_columns, optional_columns, required_columns, required_time

revision = "0052"
down_revision = "0051"

COUNTS = ("requests", "failed", "rejected", "disconnected", "prompt_tokens", "cached_tokens", "output_tokens")
MORE = ("num_ttft", "preemptions", "cost_nanodollars", "num_slo_attained", "num_slo_requests")
LATER = ("speculative_tokens", "speculative_used_tokens", "credit_nanodollars", "num_guarantees", "num_guarantees_met")
BYTES = ("expert_read_bytes", "expert_moved_bytes")


def upgrade() -> None:
    """Create the tables. They are empty at first: a retention job sums up the existing requests during operation."""
    wide = sa.BigInteger().with_variant(sa.Numeric(38, 0), "postgresql")
    op.create_table(
        "usage_attributed_sums",
        *key_columns(sa.Text(), "tenant_id"),
        *key_columns(sa.DateTime(timezone=True), "start"),
        sa.Column("number", sa.BigInteger(), primary_key=True, autoincrement=False),
        *required_columns(sa.Text(), "project_id", "key_id", "model", "service_class"),
        *optional_columns(sa.Text(), "end_user", "tags"),
        *required_columns(sa.BigInteger(), *COUNTS, *MORE),
        *_zero_columns(sa.BigInteger(), *LATER, *(f"{name}_high" for name in BYTES)),
        *_zero_columns(wide, *BYTES),
        *required_columns(sa.Double(), "ttft_ms", "duration_ms"),
    )
    op.create_index("ix_usage_attributed_sums_start", "usage_attributed_sums", ["start"])
    op.create_table(
        "usage_attributed_spans",
        *key_columns(sa.Text(), "tenant_id"),
        *key_columns(sa.DateTime(timezone=True), "start"),
        required_time("until"),
        required_time("day"),
        *required_columns(sa.BigInteger(), *COUNTS, *MORE),
        *_zero_columns(sa.BigInteger(), *LATER),
    )
    op.create_index("ix_usage_attributed_spans_day", "usage_attributed_spans", ["day"])
    op.add_column(
        "usage_day_marks", sa.Column("is_attributed", sa.Boolean(), nullable=False, server_default=sa.false())
    )


def _zero_columns(kind: TypeEngine[int], *names: str) -> list[sa.Column[int]]:
    return [sa.Column(name, kind, nullable=False, server_default="0") for name in names]


def downgrade() -> None:
    """Drop the tables and the column."""
    op.drop_column("usage_day_marks", "is_attributed")
    op.drop_table("usage_attributed_spans")
    op.drop_table("usage_attributed_sums")
