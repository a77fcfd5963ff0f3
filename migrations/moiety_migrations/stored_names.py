"""Names of tables and columns, and stored words, before version 0.2.0, by the present ones.

Revisions up to 0022 create tables and columns under their former names; revision 0023 renames them. The names are data,
so that a search for a former name finds this one table.
"""

from __future__ import annotations

import json
from pathlib import Path

_NAMES = json.loads(Path(__file__).with_name("stored_names.json").read_text(encoding="utf-8"))
TABLES: dict[str, str] = _NAMES["tables"]  # former name by present name
COLUMNS: dict[str, dict[str, str]] = _NAMES["columns"]  # the same, by the table's present name
VALUES: dict[str, dict[str, dict[str, str]]] = _NAMES["values"]  # former word by present word, by table and column


def former_table(present: str) -> str:
    """Return the name that a table had before revision 0023."""
    return TABLES[present]


def former_column(table: str, present: str) -> str:
    """Return the name that a column had before revision 0023."""
    return COLUMNS[table][present]
