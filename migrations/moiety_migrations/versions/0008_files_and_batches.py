"""Files, batches and their lines."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

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
        *_ids("tenant", "project"),
        sa.Column("purpose", sa.String(32), nullable=False),
        sa.Column("filename", sa.String(255), nullable=False),
        sa.Column("state", sa.String(16), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_ms", sa.BigInteger(), nullable=False),
        sa.Column("touched_ms", sa.BigInteger(), nullable=False),
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
        *_ids("tenant", "project", "key"),
        sa.Column("endpoint", sa.String(64), nullable=False),
        *_ids("input_file"),
        sa.Column("note", sa.JSON()),
        sa.Column("output_expires_s", sa.Integer()),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("closing_as", sa.String(16)),
        sa.Column("closing_error", sa.JSON()),
        sa.Column("errors", sa.JSON()),
        sa.Column("output_file_id", sa.String(32)),
        sa.Column("error_file_id", sa.String(32)),
        *(sa.Column(name, sa.Integer(), nullable=False) for name in ("total", "completed", "failed")),
        *(sa.Column(f"{name}_tokens", sa.BigInteger(), nullable=False) for name in ("prompt", "cached", "output")),
        *(sa.Column(f"{name}_ms", sa.BigInteger(), nullable=False) for name in ("available", "created", "expires")),
        *(sa.Column(f"{name}_ms", sa.BigInteger()) for name in _MOMENTS),
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
        sa.Column("num_refusals", sa.Integer(), nullable=False),
        sa.Column("num_failures", sa.Integer(), nullable=False),
        sa.Column("answer", sa.LargeBinary()),
        sa.Column("answer_bytes", sa.Integer(), nullable=False),
        sa.CheckConstraint("state IN ('pending', 'completed', 'failed')", name=op.f("ck_batch_lines_state_known")),
    )
    op.create_index("ix_batch_lines_batch_id_state_number", "batch_lines", ["batch_id", "state", "number"])


def _ids(*names: str) -> list[sa.Column[str]]:
    """Return columns with the ids of a row's owners, such as its tenant and project."""
    return [sa.Column(f"{name}_id", sa.String(32), nullable=False) for name in names]
