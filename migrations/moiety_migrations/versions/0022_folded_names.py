"""Folded names of tenants and projects, by which two names count as the same."""

from __future__ import annotations

import logging
import unicodedata

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"

_OWNER = {"tenants": None, "projects": "tenant_id"}  # scope in which a name is unique
_LENGTH = 400

log = logging.getLogger("moiety_migrations")


def upgrade() -> None:
    """Add and fill in folded names.

    Of rows whose names count as the same, the oldest gets the folded name. Each other one gets a folded name that its
    id makes unique: it keeps its name, and is found by its id and by the exact name.
    """
    for table, owner in _OWNER.items():
        op.add_column(table, sa.Column("folded_name", sa.String(_LENGTH)))
        _fill(table, owner)
        columns = ["folded_name"] if owner is None else [owner, "folded_name"]
        op.create_index(f"ix_{table}_{'_'.join(columns)}", table, columns, unique=True)


def downgrade() -> None:
    """Drop the indexes and columns."""
    for table, owner in _OWNER.items():
        op.drop_index(f"ix_{table}_folded_name" if owner is None else f"ix_{table}_{owner}_folded_name", table)
        op.drop_column(table, "folded_name")


def _fill(name: str, owner: str | None) -> None:
    connection = op.get_bind()
    columns: list[sa.ColumnClause[str]] = [
        sa.column(one) for one in ("id", "name", "created_at", "folded_name", "tenant_id")
    ]
    table = sa.table(name, *columns)
    of = sa.literal("") if owner is None else table.c[owner]
    rows = connection.execute(sa.select(table.c.id, table.c.name, of).order_by(table.c.created_at, table.c.id)).all()
    first: dict[tuple[str, str], str] = {}
    filled = []
    for row_id, text, scope in rows:
        folded = _fold(text)
        oldest = first.setdefault((scope, folded), row_id)
        if oldest != row_id:
            log.warning(
                "%s: the name %r of %s counts as that of %s, which is older; both keep their names: rename one of them",
                name, text, row_id, oldest,
            )  # fmt: skip
            folded = f"{folded}\t{row_id}"
        filled.append({"row": row_id, "folded": folded})
    if filled:
        change = table.update().where(table.c.id == sa.bindparam("row")).values(folded_name=sa.bindparam("folded"))
        connection.execute(change, filled)


def _fold(name: str) -> str:
    folded = unicodedata.normalize("NFC", name).casefold()
    return unicodedata.normalize("NFC", folded)
