"""Markdown table of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

HEAD = (
    "fault",
    "lasted",
    "requests",
    "left by clients",
    "refused",
    "harmed",
    "harmed after",
    "the last after",
    "whole after",
    "holds",
)


def as_markdown(report: Mapping[str, Any]) -> str:
    """Return one row for each fault, and the results of the checks."""
    machine = report["environment"]
    lines = [
        f"# Chaos, {report['date']}",
        "",
        f"`{report['command']}` · {machine['num_cpus']} cores · revision {machine['git_revision']}",
        "",
        f"| {' | '.join(HEAD)} |",
        f"|{'---|' * len(HEAD)}",
        *(f"| {' | '.join(_cells(row))} |" for row in report["faults"]),
        "",
        "*Harmed*: cut, failed or never answered, of the requests that began during the fault, and in the quiet after "
        "it, with the last such. *Whole*: all parts serve and see each other again, after the fault's end.",
        "",
        "| what must hold | does |",
        "|---|---|",
        *(
            f"| {name.replace('_', ' ')} | {'yes' if holds else '**no**'} |"
            for name, holds in report["verdict"].items()
        ),
        "",
        _figures(report),
        "",
    ]
    return "\n".join(lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    during = row["during"]
    harmed = sum(during.get(name, 0) for name in ("cut", "failed", "no_answer", "unreachable"))
    return [
        row["fault"],
        f"{row['seconds']} s",
        str(during["requests"]),
        str(during.get("left", 0)),
        str(during.get("refused", 0)),
        str(harmed),
        str(sum(row["suffered_after"].values())),
        f"{row['last_failure_after_s']} s",
        "never" if row["whole_after_s"] is None else f"{row['whole_after_s']} s",
        "yes" if row["recovered"] else "**no**",
    ]


def _figures(report: Mapping[str, Any]) -> str:
    priority, books, batch = report["priority"], report["books"], report["batch"]
    engines = books["engines"] or {"compared": 0, "unproven": 0}
    growth = max((row["growth"] for row in report["processes"]), default=0.0)
    return (
        f"{sum(report['requests'].values())} requests and a batch of {batch['lines']} lines; {books['rows']} rows "
        f"booked, {engines['compared']} compared with what engines counted. Priority: {priority['attainment']:.2%} of "
        f"{priority['requests']} requests outside of faults attained their SLO. "
        f"Memory of a process grew by at most {growth:.1%}."
    )
