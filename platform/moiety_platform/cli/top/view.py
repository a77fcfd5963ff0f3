"""View of `moiety top`: three sorted tables, cut to the terminal's height."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moiety_platform.cli.top.reading import WINDOW, Report, Row

KEYS = "q quit · tab table · < > column · r reverse"
FRAME_LINES = 2  # the line above and the one below
TABLE_LINES = 2  # a table's title and its headings
MIN_ROWS = 2  # rows that every table gets, however low the terminal is
STATE_STYLES = {"ready": "green", "lost": "red", "draining": "yellow"}


@dataclass(frozen=True, slots=True)
class Column:
    """Column of a table; `form` is text, count, rate, share or ms."""

    field: str
    heading: str
    form: str = "text"


TOTALS = (
    Column("requests_per_min", "req/min", "rate"),
    Column("output_tokens_per_s", "out tok/s", "rate"),
    Column("slo_attainment", "SLO", "share"),
    Column("mean_ttft_ms", "TTFT ms", "ms"),
    Column("rejected", "reject", "count"),
)
COLUMNS = {
    "engines": (
        Column("engine", "engine"),
        Column("state", "state"),
        Column("running", "run", "count"),
        Column("waiting", "wait", "count"),
        Column("kv_used", "KV", "share"),
        Column("cache_hits", "hits", "share"),
        Column("prompt_tokens_per_s", "in tok/s", "rate"),
        Column("output_tokens_per_s", "out tok/s", "rate"),
    ),
    "classes": (
        Column("class", "class"),
        Column("running", "run", "count"),
        Column("waiting", "wait", "count"),
        *TOTALS,
        Column("preemptions", "preempt", "count"),
    ),
    "tenants": (
        Column("tenant", "tenant"),
        Column("share", "share", "share"),
        *TOTALS,
        Column("failed", "failed", "count"),
    ),
}
TABLES = tuple(COLUMNS)


@dataclass
class ViewChoice:
    """The user's choices: the selected table, and the sort column and direction of each table."""

    table: str = "tenants"
    sorted_by: dict[str, int] = field(default_factory=lambda: {"engines": 0, "classes": -1, "tenants": 1})
    downwards: dict[str, bool] = field(default_factory=lambda: {"engines": False, "classes": False, "tenants": True})

    def press(self, key: str) -> None:
        """Apply a key; ignore unknown keys."""
        table = self.table
        if key == "\t":
            self.table = TABLES[(TABLES.index(table) + 1) % len(TABLES)]
        elif key in "<>":
            step = 1 if key == ">" else -1
            self.sorted_by[table] = (self.sorted_by[table] + step) % len(COLUMNS[table])
        elif key == "r":
            self.downwards[table] = not self.downwards[table]

    def sort(self, table: str, rows: Sequence[Row]) -> list[Row]:
        """Return sorted rows; those without a value come last. Classes keep their order until a column is chosen."""
        index = self.sorted_by[table]
        if index < 0:
            return list(rows)
        name = COLUMNS[table][index].field
        known = [row for row in rows if row[name] is not None]
        known.sort(key=lambda row: row[name], reverse=self.downwards[table])
        return known + [row for row in rows if row[name] is None]


def screen(report: Report, choice: ViewChoice, height: int | None, note: str = "", keys: bool = True) -> RenderableType:
    """Return the whole screen. `height` is the terminal's; None shows every row."""
    rows = {"engines": report.engines, "classes": report.classes, "tenants": report.tenants}
    room = rows_shown({name: len(of or ()) for name, of in rows.items()}, height)
    minutes = f"{WINDOW.seconds // 60} min"
    titles = {"engines": "Engines, now", "classes": f"Classes, {minutes}", "tenants": f"Tenants, {minutes}"}
    parts: list[RenderableType] = [
        Text(f"moiety top  {report.at.astimezone():%H:%M:%S}  {note}".rstrip(), style="bold")
    ]
    for name, title in titles.items():
        parts += section(name, title, rows[name], room[name], choice, marked=choice.table == name if keys else None)
    if keys:
        parts.append(Text(KEYS, style="dim"))
    return Group(*parts)


def rows_shown(wanted: dict[str, int], height: int | None) -> dict[str, int]:
    """Return the number of rows of each table: at first a few each, then the rest in order to those that need more."""
    if height is None:
        return wanted
    left = max(0, height - FRAME_LINES - TABLE_LINES * len(wanted))
    room = dict.fromkeys(wanted, 0)
    for most in (MIN_ROWS, height):
        for name, count in wanted.items():
            more = min(left, min(count, most) - room[name])
            room[name] += max(0, more)
            left -= max(0, more)
    return room


def section(
    name: str, title: str, rows: Sequence[Row] | None, room: int, choice: ViewChoice, *, marked: bool | None
) -> list[RenderableType]:
    """Return a title and a table, or a line that says why there is none. `marked` is None outside a terminal."""
    heading = Text(title, style="reverse" if marked else "underline")
    if rows is None:
        return [heading, Text("this key may not see engines", style="dim")]
    if not rows:
        return [heading, Text({"engines": "no engine is connected"}.get(name, "no request has ended"), style="dim")]
    if len(rows) > room:
        heading.append(f"  {room} of {len(rows)}", style="dim not reverse not underline")
    table = Table(box=None, expand=marked is not None, pad_edge=False, padding=(0, 1, 0, 0), header_style="dim")
    for index, column in enumerate(COLUMNS[name]):
        arrow = ("▼" if choice.downwards[name] else "▲") if index == choice.sorted_by[name] else ""
        is_text = column.form == "text"
        table.add_column(column.heading + arrow, justify="left" if is_text else "right", no_wrap=True,
                         overflow="ellipsis", ratio=3 if index == 0 else None)  # fmt: skip
    for row in choice.sort(name, rows)[:room]:
        table.add_row(*(cell(row[column.field], column) for column in COLUMNS[name]))
    return [heading, table]


def cell(value: object, column: Column) -> Text:
    if value is None:
        return Text("–", style="dim")
    if isinstance(value, str):
        return Text(brief(value), style=STATE_STYLES.get(value, "") if column.field == "state" else "")
    assert isinstance(value, int | float), "a figure"
    if column.form == "share":
        return Text(f"{value:.1%}" if value < 1 else f"{value:.0%}")
    return Text(f"{value:,.0f}" if column.form == "count" or value >= 100 else f"{value:,.1f}")


def brief(name: str) -> str:
    """Return the end of an address, where addresses differ; any other name unchanged. No control characters."""
    found = name.rsplit("/", 1)[-1] if "://" in name else name
    return "".join(letter if letter.isprintable() else "?" for letter in found)
