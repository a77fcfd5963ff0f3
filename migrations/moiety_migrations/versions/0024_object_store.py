"""Contents of files and adapters in an object store: their keys, and which store belongs to the database."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"

_TABLES = ("files", "adapters")


def upgrade() -> None:
    """Add the columns and the table. Contents stay in SQL until a gateway moves them to its object store."""
    for table in _TABLES:
        op.add_column(table, sa.Column("object_key", sa.String(128)))
        op.create_index(f"ix_{table}_object_key", table, ["object_key"])
    op.add_column("files", sa.Column("digest", sa.String(64)))
    op.create_index("ix_files_batch_id", "files", ["batch_id"])
    op.create_table(
        "object_stores",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("deployment_id", sa.String(32), nullable=False),
        sa.Column("mark", sa.String(80)),
    )


def downgrade() -> None:
    """Drop both, and the rows of files and adapters whose contents are objects: SQL has no content for them."""
    op.drop_table("object_stores")
    op.drop_index("ix_files_batch_id", "files")
    for chunks, owner, table in (("file_chunks", "file_id", "files"), ("adapter_chunks", "adapter_id", "adapters")):
        op.execute(f"DELETE FROM {chunks} WHERE {owner} IN (SELECT id FROM {table} WHERE object_key IS NOT NULL)")
    op.execute("DELETE FROM files WHERE object_key IS NOT NULL")
    op.execute("DELETE FROM adapters WHERE object_key IS NOT NULL")
    op.drop_column("files", "digest")
    for table in _TABLES:
        op.drop_index(f"ix_{table}_object_key", table)
        op.drop_column(table, "object_key")
