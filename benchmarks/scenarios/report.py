"""Markdown report from the JSON alone: targets, measurements, commands, and whether each target holds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_MARKS = {None: "", True: "yes", False: "**no**"}
_INTRODUCTION = """# Scheduling, in simulation

The real scheduler and block pool under virtual time (`moiety simulate`), against the targets that were set before and
against rival policies behind the same interface. C is what saturated FCFS completes of the same requests. Attainment
has all arrivals in its denominator, those turned away included. Figures are the median over seeds, with the least and
the greatest in brackets where they differ; a target holds only if every seed keeps it. The rivals are our own
implementations of what was published, on our own model of the devices, so what is comparable with the papers is the
order and the rough size. [docs/scheduling.md](../../docs/scheduling.md) explains the policy.
"""


def write_report(report: dict[str, Any], path: Path) -> None:
    scenarios = report["scenarios"]
    parts = [_INTRODUCTION, _environment(scenarios), "## Targets\n", _targets(scenarios)]
    if calibration := _calibration(scenarios):
        parts += ["## Calibration\n", calibration]
    for name, entry in scenarios.items():
        parts.append(_section(name, entry, report.get("charts", {}).get(name)))
    path.write_text("\n".join(parts), encoding="utf-8")


def _environment(scenarios: dict[str, Any]) -> str:
    lines = []
    stamps: dict[tuple[str, ...], list[str]] = {}
    for name, entry in scenarios.items():
        environment = entry["environment"]
        stamp = (
            f"revision {environment['git_revision']}",
            f"Python {environment['python']}",
            f"numpy {environment['numpy']}",
            f"seeds {', '.join(map(str, entry['seeds'])) or 'none'}",
            f"{entry['duration_s']:g} s of arrivals",
            entry["date"],
        )
        stamps.setdefault(stamp, []).append(name)
    lines += [f"- {', '.join(names)}: {'; '.join(stamp)}" for stamp, names in stamps.items()]
    return "\n".join(lines) + "\n"


def _targets(scenarios: dict[str, Any]) -> str:
    lines = ["| | asked | target | measured | holds |", "|---|---|---|---|---|"]
    for name, entry in scenarios.items():
        lines += [
            f"| {name} | {row['asked']} | {row['target']} | {row['ours']} | {_MARKS[row['holds']]} |"
            for row in entry["rows"]
            if row["holds"] is not None
        ]
    return "\n".join(lines) + "\n"


def _calibration(scenarios: dict[str, Any]) -> str:
    """Return the published figures beside the simulator's for the same policies."""
    rows = [(name, row) for name, entry in scenarios.items() for row in entry["rows"] if row["published"]]
    if not rows:
        return ""
    lines = ["| | figure | published | simulated |", "|---|---|---|---|"]
    for name, row in rows:
        simulated = ", ".join(f"{policy} {text}" for policy, text in row["rivals"].items())
        lines.append(f"| {name} | {row['asked']} | {row['published']} | {simulated}; moiety {row['ours']} |")
    return "\n".join(lines) + "\n"


def _section(name: str, entry: dict[str, Any], chart: str | None) -> str:
    rivals = list(dict.fromkeys(policy for row in entry["rows"] for policy in row["rivals"]))
    lines = [
        f"## {name}: {entry['title']}\n",
        f"{entry['setting']}\n",
        f"`{entry['command']}`\n",
        f"| asked | target | moiety |{''.join(f' {policy} |' for policy in rivals)} holds |",
        f"|---|---|---|{'---|' * len(rivals)}---|",
    ]
    for row in entry["rows"]:
        others = "".join(f" {row['rivals'].get(policy, '')} |" for policy in rivals)
        lines.append(f"| {row['asked']} | {row['target']} | {row['ours']} |{others} {_MARKS[row['holds']]} |")
    lines += ["", *(f"- {note}" for note in entry["notes"])]
    if chart:
        lines += ["", f"![{entry['title']}]({chart})"]
    return "\n".join(lines) + "\n"
