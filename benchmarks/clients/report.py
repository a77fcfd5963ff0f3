"""The matrix as a Markdown table and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from typing import Any

SHOWN = {"not applicable": "–"}


@dataclass(frozen=True, slots=True)
class Cell:
    """Outcome of one task of one client: pass, refused, fail or not applicable."""

    outcome: str
    detail: str = ""


@dataclass(frozen=True, slots=True)
class Row:
    """All outcomes of one client."""

    client: str
    version: str
    cells: dict[str, Cell]


def as_markdown(rows: Sequence[Row], tasks: Sequence[str], servers: Mapping[str, str]) -> str:
    """Return the table; the reasons follow as a list."""
    lines = [f"| client | version | {' | '.join(tasks)} |", f"|---|---|{'---|' * len(tasks)}"]
    notes = []
    for row in rows:
        shown = [SHOWN.get(row.cells[task].outcome, row.cells[task].outcome) for task in tasks]
        lines.append(f"| {row.client} | {row.version} | {' | '.join(shown)} |")
        for task in tasks:
            cell = row.cells[task]
            if cell.detail:
                notes.append(f"- {row.client}, {task}: {cell.outcome}: {' '.join(cell.detail.split())}")
    by_server: dict[str, list[str]] = {}
    for task in tasks:
        by_server.setdefault(servers[task], []).append(task)
    told = "; ".join(f"{server}: {', '.join(names)}" for server, names in by_server.items())
    legend = (
        f"Engines: {told}. Coding agents meet the scripted engine in every task but cancel, there an engine process "
        "whose answers take minutes."
    )
    return "\n".join([*lines, "", legend, *(["", *notes] if notes else []), ""])


def as_json(rows: Sequence[Row], environment: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures with the environment."""
    return {"date": date.today().isoformat(), "environment": environment, "clients": [asdict(row) for row in rows]}
