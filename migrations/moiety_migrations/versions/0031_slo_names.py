"""Renames to the field's terms: whether a request attained its SLO, in usage rows and in kept traces."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"

COLUMN, FORMER_COLUMN = "slo_attained", "sla_attained"
CODES = {  # by column of `traces`: present and former code
    "kept_for": ("slo_missed", "sla_missed"),
    "reason": ("slo_unattainable", "beyond_repair"),
}
JSON_TEXTS = {  # by JSON column of `spans`: present and former text. Neither can be within a JSON string.
    "attributes": [
        ('"moiety.slo_attained":', '"moiety.sla_attained":'),
        ('"moiety.kept_for":"slo_missed"', '"moiety.kept_for":"sla_missed"'),
        ('"moiety.kept_for": "slo_missed"', '"moiety.kept_for": "sla_missed"'),
    ],
    "events": [
        ('"moiety.reason":"slo_unattainable"', '"moiety.reason":"beyond_repair"'),
        ('"moiety.reason": "slo_unattainable"', '"moiety.reason": "beyond_repair"'),
    ],
}


def upgrade() -> None:
    """Rename the column, and the codes in traces and spans."""
    op.execute(f'ALTER TABLE "usage" RENAME COLUMN {FORMER_COLUMN} TO {COLUMN}')
    for column, (present, former) in CODES.items():
        _replace_code(column, former, present)
    for column, texts in JSON_TEXTS.items():
        _replace_in_json(column, [(former, present) for present, former in texts])


def downgrade() -> None:
    """Restore the former names."""
    for column, texts in JSON_TEXTS.items():
        _replace_in_json(column, texts)
    for column, (present, former) in CODES.items():
        _replace_code(column, present, former)
    op.execute(f'ALTER TABLE "usage" RENAME COLUMN {COLUMN} TO {FORMER_COLUMN}')


def _replace_code(column: str, old: str, new: str) -> None:
    field: sa.ColumnClause[str] = sa.column(column)
    op.execute(sa.update(sa.table("traces", field)).where(field == old).values({column: new}))


def _replace_in_json(column: str, texts: list[tuple[str, str]]) -> None:
    """Replace each old text by its new one, in one pass over `spans`."""
    field: sa.ColumnClause[str] = sa.column(column)
    text = sa.cast(field, sa.Text)
    replaced: sa.ColumnElement[str] = text
    for old, new in texts:
        replaced = sa.func.replace(replaced, old, new)
    value = sa.cast(replaced, sa.JSON) if op.get_bind().dialect.name == "postgresql" else replaced
    found = sa.or_(*(text.contains(old, autoescape=True) for old, _ in texts))
    op.execute(sa.update(sa.table("spans", field)).where(found).values({column: value}))
