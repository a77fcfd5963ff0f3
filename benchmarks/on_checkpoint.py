"""Shared parts of the benchmarks on the random checkpoint: options, the checkpoint itself, and output files."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from datetime import date
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent


def make_parser(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with `--threads`, `--work` and `--output`; `result` is the default file in `results/`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--work", type=Path, default=Path.home() / ".cache" / "moiety-benchmarks")
    parser.add_argument("--output", type=Path, default=HERE / "results" / result)
    return parser


def find_or_make_checkpoint(work: Path, family: str = "qwen3_moe") -> Path:
    """Return the checkpoint, created in a separate process so that none of its memory stays in this one."""
    checkpoint = work / f"{family.replace('_', '-')}-670m"
    if not (checkpoint / "config.json").exists():
        subprocess.run([sys.executable, HERE / "checkpoint.py", checkpoint, family], check=True)
    return checkpoint


def loaded_run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the head of a report: when and how the benchmark ran, its options, and the load of the machine."""
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "load_average": os.getloadavg(),
        "settings": {name: str(value) for name, value in vars(options).items() if name not in ("output", "work")},
    }


def ratios_report(
    settings: dict[str, Any],
    environment: dict[str, Any] | None,
    ratios: list[dict[str, float]],
    rounds: list[dict[str, Any]],
) -> dict[str, Any]:
    """Return the report of rounds with rivals: when and how they ran, and the median of each ratio."""
    return {
        "date": date.today().isoformat(),
        "command": " ".join(["python", *sys.argv]),
        "settings": settings,
        "environment": environment,
        "ratio_median": {name: statistics.median(one[name] for one in ratios) for name in ratios[0]},
        "rounds": rounds,
    }


def write_report(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
