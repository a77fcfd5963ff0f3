"""Output of admin API responses on the terminal: a table for people, JSON for programs."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from moiety_platform.printable import printable, printable_lines

_FORMULA = re.compile(r"[\s\x00]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
PIPE_WIDTH = 1000


def show_rows(rows: Sequence[Mapping[str, Any]], columns: Mapping[str, str], as_json: bool) -> None:
    """Show rows as a table or as JSON. `columns` maps a field to its heading; JSON has every field."""
    if as_json:
        show_json({"data": list(rows)})
        return
    table = Table(*columns.values())
    for row in rows:
        table.add_row(*(as_text(row.get(field)) for field in columns))
    make_console().print(table)


def show_row(row: Mapping[str, Any], as_json: bool) -> None:
    """Show one object, one line per field."""
    if as_json:
        show_json(row)
        return
    table = Table(show_header=False)
    for field, value in row.items():
        table.add_row(field.replace("_", " "), as_text(value))
    make_console().print(table)


def make_console() -> Console:
    """Return a console of the terminal's width; in a pipe it is wide enough to cut nothing."""
    return Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)


def show_json(value: Any) -> None:
    # writes escape sequences as JSON escapes
    sys.stdout.write(printable_lines(json.dumps(value, indent=2, ensure_ascii=False)) + "\n")


def show_csv(rows: Sequence[Mapping[str, Any]]) -> None:
    """Write CSV with the fields of the first row as the header; nothing for no rows. Null values are empty."""
    writer = csv.DictWriter(sys.stdout, list(rows[0]) if rows else [], lineterminator="\n")
    if rows:
        writer.writeheader()
        writer.writerows({field: escape_formula(_plain(value)) for field, value in row.items()} for row in rows)


def as_text(value: Any) -> Text:
    """Return a cell without rich's markup, emoji codes or terminal escape sequences."""
    return Text(printable(show_value(value)))


def _plain(value: Any) -> Any:
    return printable_lines(value) if isinstance(value, str) else value


def escape_formula(value: Any) -> Any:
    """Return a cell that no spreadsheet takes for a formula (OWASP, CSV injection). Numbers stay numbers."""
    if isinstance(value, str) and _FORMULA.match(value) and not _NUMBER.fullmatch(value):
        return "'" + value
    return value


def show_value(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    if isinstance(value, float):
        return f"{value:,.1f}"
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return show_time(value) if isinstance(value, str) and value[10:11] == "T" else str(value)


def show_time(text: str) -> str:
    """Return a time in the user's time zone, to the second; any other text unchanged."""
    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except ValueError:
        return text
