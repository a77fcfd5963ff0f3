"""`make fuzz`: mutated input for all code that reads input of clients, engines and files, one target after the other.

The fuzzer is atheris, guided by coverage. A finding ends its target and is printed with its input. Inputs that reach
new code are kept in `.fuzz` for the next run, and some of them in the corpora (`--keep`), which `make test` runs."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Annotated

import typer
from tests.fuzz.corpora import FIGURES, TARGETS, keep, kept

from moiety_platform.bench.environment import describe_environment

MAX_KEPT = 60
MAX_KEPT_BYTES = 1024
FINDINGS = ("crash-", "timeout-", "oom-")


def fuzz(
    names: Annotated[list[str] | None, typer.Argument(help="Targets; all of them if none is named.")] = None,
    seconds: Annotated[float, typer.Option(min=1, help="Of each target, by the clock.")] = 60,
    cpu_seconds: Annotated[float, typer.Option(min=1, help="Of each target, of the processor.")] = 1e9,
    work: Annotated[Path, typer.Option(help="What was found, and what reaches new code.")] = Path(".fuzz"),
    report: Annotated[Path | None, typer.Option(help="A JSON file to which the figures are added.")] = None,
    keep_some: Annotated[bool, typer.Option("--keep", help="Add what reaches new code to the corpora.")] = False,
    show: Annotated[bool, typer.Option("--list", help="Say which targets there are, and end.")] = False,
) -> None:
    """Fuzz. Ends with 1 if anything was found."""
    unknown = sorted(set(names or ()) - TARGETS.keys())
    if unknown:
        raise typer.BadParameter(f"there is no target {unknown[0]!r}; there are: {', '.join(TARGETS)}")
    if show:
        for target in TARGETS.values():
            typer.echo(f"{target.name:12} {target.told}")
        return
    if importlib.util.find_spec("atheris") is None:
        raise typer.BadParameter("atheris is not installed: pip install 'moiety[fuzz]', or run `make fuzz`")
    found = 0
    for name in names or TARGETS:
        figures = run(name, work / name, seconds, cpu_seconds)
        typer.echo(f"{name}: {json.dumps(figures)}")
        found += figures["findings"]
        if keep_some:
            keep_some_of(name, work / name)
        if report is not None:
            add_to(report, name, figures)
    raise typer.Exit(1 if found else 0)


def run(name: str, work: Path, seconds: float, cpu_seconds: float) -> dict[str, int]:
    """Fuzz one target; what its process says of itself goes to `log` beside what it found."""
    corpus, artifacts = work / "corpus", work / "found"
    for folder in (corpus, artifacts):
        folder.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(kept(name)):
        (corpus / f"kept-{number}").write_bytes(data)
    before = set(artifacts.iterdir())
    (work / FIGURES).write_text("{}")
    command = [sys.executable, "-m", "tests.fuzz.child", name, str(work), str(seconds), str(cpu_seconds)]
    with (work / "log").open("wb") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False)
    inputs = [path for path in artifacts.iterdir() if path not in before and path.name.startswith(FINDINGS)]
    for path in inputs:
        typer.echo(f"{name}: found {path}; its trace is in {work / 'log'}")
    if ended.returncode and not inputs:
        typer.echo((work / "log").read_text(errors="replace")[-4000:], err=True)
        raise typer.Exit(2)
    return {
        **json.loads((work / FIGURES).read_text()),
        "corpus": sum(1 for _ in corpus.iterdir()),
        "findings": len(inputs),
    }


def keep_some_of(name: str, work: Path) -> None:
    """Beside what is kept already, some of what reaches new code, of all lengths."""
    reached = sorted((work / "corpus").iterdir(), key=lambda path: path.stat().st_size)
    more = [path.read_bytes() for path in reached if path.stat().st_size <= MAX_KEPT_BYTES]
    room = max(0, MAX_KEPT - len(kept(name)))
    keep(name, [*kept(name), *more[:: len(more) // room + 1]] if room else kept(name))


def add_to(report: Path, name: str, figures: dict[str, int]) -> None:
    told = json.loads(report.read_text()) if report.exists() else {"targets": {}}
    before = told["targets"].get(name, {})
    sums = {field: before.get(field, 0) + figures.get(field, 0) for field in ("executions", "wall_s", "cpu_s")}
    told["targets"][name] = {**sums, "corpus": figures["corpus"], "findings_of_last_run": figures["findings"]}
    told["environment"] = describe_environment()
    report.write_text(json.dumps(told, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    typer.run(fuzz)
