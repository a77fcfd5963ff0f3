"""`moiety kernels report` and `moiety kernels tune`. Imports neither torch nor Triton until one of them is called."""

from __future__ import annotations

import importlib.util
import json
import os
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moiety_kernels.bench.cli import bench_kernels
from moiety_kernels.environment import describe_environment
from moiety_kernels.gpu.targets import TARGETS

FAILED = 1
app = typer.Typer(name="kernels", no_args_is_help=True, add_completion=False)


@app.callback()
def kernels() -> None:
    """The kernels for GPUs: what they take of each, and which variants are fastest on this one."""


@app.command("report")
def report_command(
    operations: Annotated[list[str] | None, typer.Argument(help="Operations, such as rms_norm [all]")] = None,
    target: Annotated[list[str] | None, typer.Option(help="of sm_80, sm_90, sm_100, gfx942; may be repeated")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Compile every variant of every kernel and list the registers, spills and shared memory that it takes.

    Needs Triton, but no GPU. Ends with 1 where a variant does not compile.
    """
    targets = target or ["sm_90"]
    _check_names("--target", targets, list(TARGETS))
    _require_triton()
    from moiety_kernels.gpu.report import operations as all_operations  # noqa: PLC0415 - imports Triton
    from moiety_kernels.gpu.report import table  # noqa: PLC0415

    known = all_operations()
    names = operations or known
    _check_names("operation", names, known)
    with _progress() as bar:
        task = bar.add_task("compiling", total=len(targets) * len(names))
        rows = table(targets, names, lambda: bar.update(task, advance=1))
    if as_json:
        settings = {"targets": targets, "operations": names}
        environment = describe_environment("torch", "triton")
        typer.echo(json.dumps({"environment": environment, "settings": settings, "rows": rows}))
    else:
        _print_report(rows)
    if any(row["error"] for row in rows):
        raise typer.Exit(FAILED)


def standalone() -> None:
    """These commands and `bench`, as `python -m moiety_kernels`."""
    app.command("bench")(bench_kernels)
    app(prog_name="python -m moiety_kernels")


def _require_triton() -> None:
    if importlib.util.find_spec("triton") is None:
        raise _failure("Triton is not installed; run: pip install triton")
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise _failure("TRITON_INTERPRET is set, under which nothing is compiled; unset it")


def _failure(message: str) -> typer.Exit:
    typer.echo(f"moiety kernels: {message}", err=True)
    return typer.Exit(FAILED)


def _check_names(what: str, names: list[str], known: list[str]) -> None:
    unknown = [name for name in names if name not in known]
    if unknown:
        raise typer.BadParameter(f"{what} {', '.join(unknown)} is not known; choose from {', '.join(known)}")


def _progress() -> Progress:
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    return Progress(*columns, console=console, disable=not console.is_terminal)


def _print_report(rows: list[dict[str, Any]]) -> None:
    table = Table()
    for name in ("operation", "variant", "target"):
        table.add_column(name)
    for name in ("registers", "spilled bytes", "shared bytes"):
        table.add_column(name, justify="right")
    for row in rows:
        taken = [row.get(name) for name in ("registers", "spill_bytes", "shared_bytes")]
        shown = [row["error"] or "", "", ""] if row["error"] else [str(value) for value in taken]
        table.add_row(row["operation"], row["variant"], row["target"], *shown)
    Console().print(table)
