"""Files, batches and their lines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

from moiety_migrations.columns import optional_columns, required_columns

revision = "0008"
down_revision = "0007"

_MOMENTS = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")


def upgrade() -> None:
    """Create the four tables."""
    _make_files()
    _make_batches()


def downgrade() -> None:
    """Drop the tables and their rows."""
    for table in ("batch_lines", "batches", "file_chunks", "files"):
        op.drop_table(table)


def _make_files() -> None:
    op.create_table(
        "files",
        sa.Column("id", sa.String(32), primary_key=True),
        *required_columns(sa.String(32), "tenant_id", "project_id"),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        *required_columns(sa.BigInteger(), "num_bytes", "created_ms", "touched_ms"),
        sa.Column("expires_ms", sa.BigInteger()),
        sa.Column("batch_id", sa.String(32)),
        sa.Column("line_state", sa.String(16)),
        sa.CheckConstraint("state IN ('uploading', 'ready', 'deleted')", name=op.f("ck_files_state_known")),
    )
    op.create_index("ix_files_project_id_created_ms_id", "files", ["project_id", "created_ms", "id"])
    op.create_index("ix_files_tenant_id", "files", ["tenant_id"])
    op.create_index("ix_files_state_touched_ms", "files", ["state", "touched_ms"])
    op.create_index("ix_files_expires_ms", "files", ["expires_ms"])
    op.create_table(
        "file_chunks",
        sa.Column("file_id", sa.String(32), primary_key=True),
        sa.Column("start", sa.BigInteger(), primary_key=True),
        sa.Column("stop", sa.BigInteger(), nullable=False),
        sa.Column("data", sa.LargeBinary(), nullable=False),
    )


def _make_batches() -> None:
    op.create_table(
        "batches",
        sa.Column("id", sa.String(32), primary_key=True),
        *required_columns(sa.String(32), "tenant_id", "project_id", "key_id"),
        sa.Column("endpoint", sa.String(64), nullable=False),
        sa.Column("input_file_id", sa.String(32), nullable=False),
        sa.Column("note", sa.JSON()),
        sa.Column("output_expires_s", sa.Integer()),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("closing_as", sa.String(16)),
        *optional_columns(sa.JSON(), "closing_error", "errors"),
        *optional_columns(sa.String(32), "output_file_id", "error_file_id"),
        *required_columns(sa.Integer(), "total", "completed", "failed"),
        *required_columns(sa.BigInteger(), "prompt_tokens", "cached_tokens", "output_tokens"),
        *required_columns(sa.BigInteger(), "available_ms", "created_ms", "expires_ms"),
        *optional_columns(sa.BigInteger(), *(f"{name}_ms" for name in _MOMENTS)),
        sa.CheckConstraint("completed + failed <= total", name=op.f("ck_batches_counts_add_up")),
    )
    op.create_index("ix_batches_project_id_created_ms_id", "batches", ["project_id", "created_ms", "id"])
    op.create_index("ix_batches_tenant_id_status", "batches", ["tenant_id", "status"])
    op.create_index("ix_batches_status_created_ms", "batches", ["status", "created_ms"])
    op.create_index("ix_batches_input_file_id", "batches", ["input_file_id"])
    op.create_table(
        "batch_lines",
        sa.Column("batch_id", sa.String(32), primary_key=True),
        sa.Column("number", sa.Integer(), primary_key=True),
        sa.Column("custom_id", sa.String(256), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.Integer(), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("available_ms", sa.BigInteger(), nullable=False),
        sa.Column("owner", sa.String(64)),
        *required_columns(sa.Integer(), "num_refusals", "num_failures"),
        sa.Column("answer", sa.LargeBinary()),
        sa.Column("answer_bytes", sa.Integer(), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'completed', 'failed')", name=op.f("ck_batch_lines_state_known")),
    )
    op.create_index("ix_batch_lines_batch_id_state_number", "batch_lines", ["batch_id", "state", "number"])
