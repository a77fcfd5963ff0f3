"""Shared parts of benchmarks: options, the random checkpoint, and files with results."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
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


def make_rounds_parser(description: str | None, result: str) -> argparse.ArgumentParser:
    """Return a parser with `--rounds` and `--output`; `result` is the default file in `results/`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=HERE / "results" / result)
    return parser


def make_simulation_parser(description: str | None, seconds: float) -> argparse.ArgumentParser:
    """Return a parser with `--seconds` of simulated time, `--jobs`, and `--out`, by default the standard output."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=seconds)
    parser.add_argument("--jobs", type=int, default=2, help="runs at the same time")
    parser.add_argument("--out", type=Path)
    return parser


def print_runs(runs: Iterable[dict[str, Any]], *, without: str = "") -> list[dict[str, Any]]:
    """Return the runs, each printed to the standard error as it ends, without the figure `without`."""
    ended = []
    for run in runs:
        print({name: value for name, value in run.items() if name != without}, file=sys.stderr)
        ended.append(run)
    return ended


def median_and_range(values: Sequence[float]) -> dict[str, Any]:
    """Return the median, the least and the largest of the values, rounded to four digits."""
    return {
        "median": round(statistics.median(values), 4),
        "range": [round(min(values), 4), round(max(values), 4)],
    }


def summarize_runs(
    runs: Sequence[dict[str, Any]], fixed: Sequence[str], changing: Sequence[str] = ("seed", "took_s")
) -> list[dict[str, Any]]:
    """Return one row for the runs with the same settings `fixed`: the median and the range of each other figure.

    The figures `changing` are left out. Rows are in the order of their first runs.
    """
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(tuple(run[name] for name in fixed), []).append(run)
    return [
        {
            **dict(zip(fixed, settings, strict=True)),
            "runs": len(group),
            **{
                name: median_and_range([run[name] for run in group])
                for name in group[0]
                if name not in fixed and name not in changing
            },
        }
        for settings, group in groups.items()
    ]


def find_or_make_checkpoint(work: Path, family: str = "qwen3_moe") -> Path:
    """Return the checkpoint, created in a separate process so that none of its memory stays in this one."""
    checkpoint = work / f"{family.replace('_', '-')}-670m"
    if not (checkpoint / "config.json").exists():
        subprocess.run([sys.executable, HERE / "checkpoint.py", checkpoint, family], check=True)
    return checkpoint


def save_random_model(folder: Path, family: str, shape: Mapping[str, Any]) -> Path:
    """Write a random checkpoint of a family of transformers, in bfloat16."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **shape)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return folder


def command_and_date() -> dict[str, Any]:
    """Return the head of a report: the command as it was called, and today."""
    return {"command": " ".join(["python", *sys.argv]), "date": date.today().isoformat()}


def loaded_run(options: argparse.Namespace) -> dict[str, Any]:
    """Return the head of a report: when and how the benchmark ran, its options, and the load of the machine."""
    return {
        **command_and_date(),
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
        **command_and_date(),
        "settings": settings,
        "environment": environment,
        "ratio_median": {name: statistics.median(one[name] for one in ratios) for name in ratios[0]},
        "rounds": rounds,
    }


def write_simulation(result: dict[str, Any], path: Path | None) -> None:
    """Write the result of a simulation below its command and date, or print it if there is no path."""
    text = json.dumps(command_and_date() | result, indent=2) + "\n"
    if path is None:
        print(text, end="")
    else:
        path.write_text(text)


def write_report(report: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")
