"""Output of admin API responses on the terminal: a table for people, JSON for programs."""

from __future__ import annotations

import csv
import json
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from moiety_platform.cli.printing import print_line, print_prose
from moiety_platform.printable import printable, printable_lines

_FORMULA = re.compile(r"[\s\x00]*[=+\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[-+]?(\d+(\.\d*)?|\.\d+)([eE][-+]?\d+)?", re.ASCII)
PROSE_WIDTH = 16  # cells that prose gets at least; the rest continues on further lines
PIPE_WIDTH = 1000  # of displays that are not tables
CELL_BORDER, TABLE_BORDER = 3, 1  # cells beside the text of each column, and of the table
COMPACT_GAP = 2  # cells between the columns of a table without borders


def show_rows(
    rows: Sequence[Mapping[str, Any]],
    columns: Mapping[str, str],
    as_json: bool,
    *,
    wide: bool = False,
    details: Sequence[str] = (),
    prose: Sequence[str] = (),
) -> None:
    """Show rows as a table or as JSON. `columns` maps a field to its heading; JSON has every field.

    On a terminal, a table that is too wide has no borders, and leaves out first the columns without a value and then
    the fields `details`, in their order, and says so; if that is not enough, each row is shown as lines. Only the
    fields `prose` continue on further lines, so ids and names are never cut. In a pipe and with `wide`, all fields are
    shown whole.
    """
    if as_json:
        show_json({"data": list(rows)})
        return
    cells = [{field: as_text(row.get(field)) for field in columns} for row in rows]
    widths = {
        field: max([cell_len(heading), *(row[field].cell_len for row in cells)]) for field, heading in columns.items()
    }
    if wide or not sys.stdout.isatty():
        _print_table(columns, cells, _table_width(widths.values()))
        return
    width = make_console().width
    used = {field: min(size, PROSE_WIDTH) if field in prose else size for field, size in widths.items()}
    if _table_width(used.values()) <= width:
        _print_table(columns, cells, width, prose)
        return
    empty = [field for field in columns if rows and all(row.get(field) in (None, "", [], {}) for row in rows)]
    shown = dict(columns)
    for field in (*empty, *details):
        if _compact_width(used[one] for one in shown) <= width:
            break
        shown.pop(field, None)
    if _compact_width(used[one] for one in shown) > width:
        _print_records([{columns[field]: cell for field, cell in row.items()} for row in cells], width)
        return
    _print_table(shown, cells, width, prose, compact=True)
    left = [heading for field, heading in columns.items() if field not in shown]
    if left and rows:
        print_prose(f"not shown: {', '.join(left)}; --wide shows all")


def show_row(row: Mapping[str, Any], as_json: bool, *, wide: bool = False) -> None:
    """Show one object, one line per field; on a terminal, a long text continues on further lines."""
    if as_json:
        show_json(row)
        return
    cells = {field.replace("_", " "): as_text(value) for field, value in row.items()}
    sizes = [(cell_len(name), cell.cell_len) for name, cell in cells.items()]
    needed = _table_width(map(max, zip(*sizes, strict=True)))
    if not wide and sys.stdout.isatty() and needed > (width := make_console().width):
        _print_records([cells], width)
        return
    table = Table(show_header=False)
    for name, cell in cells.items():
        table.add_row(name, cell)
    Console(width=needed).print(table)


def _table_width(widths: Iterable[int]) -> int:
    """Return the width of a table whose columns have these widths, in cells of the terminal."""
    sizes = list(widths)
    return sum(sizes) + CELL_BORDER * len(sizes) + TABLE_BORDER


def _compact_width(widths: Iterable[int]) -> int:
    """Return the width of a table without borders, in cells of the terminal."""
    sizes = list(widths)
    return sum(sizes) + COMPACT_GAP * (len(sizes) - 1)


def _print_table(
    columns: Mapping[str, str],
    cells: Sequence[Mapping[str, Text]],
    width: int,
    prose: Sequence[str] = (),
    *,
    compact: bool = False,
) -> None:
    table = Table(box=None, padding=(0, COMPACT_GAP, 0, 0), pad_edge=False) if compact else Table()
    for field, heading in columns.items():
        table.add_column(heading, no_wrap=field not in prose, overflow="fold")
    for row in cells:
        table.add_row(*(row[field] for field in columns))
    Console(width=width).print(table)


def _print_records(records: Sequence[Mapping[str, Text]], width: int) -> None:
    """Print each record as lines of a name and a value. A value continues on further lines only between words.

    A word that does not fit beside the name stands on the next line.
    """
    margin = 2 + max((cell_len(name) for record in records for name in record), default=0)
    for number, record in enumerate(records):
        lines = [""] if number else []
        for name, value in record.items():
            longest = max(map(cell_len, value.plain.split()), default=0)
            indent = margin if longest <= width - margin else 2
            wrapped = textwrap.wrap(value.plain, max(1, width - indent), break_long_words=False, break_on_hyphens=False)
            first, *more = wrapped or [""]
            lines += [f"{name:<{margin}}{first}"] if indent == margin else [name, f"{'':<{indent}}{first}"]
            lines += [f"{'':<{indent}}{text}" for text in more]
        print_line("\n".join(lines))


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
