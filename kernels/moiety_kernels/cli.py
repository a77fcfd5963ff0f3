"""`moiety kernels report` and `moiety kernels tune`. It imports torch and Triton only when one of them is called."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moiety_kernels.bench import shapes as known
from moiety_kernels.bench.cli import bench_kernels
from moiety_kernels.environment import describe_environment
from moiety_kernels.gpu.targets import TARGETS
from moiety_kernels.options import FAILED, check_known, failure, parse_names, parse_numbers, require_package
from moiety_kernels.tuning.choices import CACHE_VARIABLE

_WEIGHTS = ("bf16", "fp8", "int8", "int4", "mxfp4")  # the names of grouped_gemm.tuning.KINDS, which needs torch
app = typer.Typer(name="kernels", no_args_is_help=True, add_completion=False)


@app.callback()
def kernels() -> None:
    """Report the resources of the GPU kernels and tune their variants for this GPU."""


@app.command("report")
def report_command(
    operations: Annotated[
        list[str] | None, typer.Argument(help="Names of operations, such as rms_norm. If not given, all.")
    ] = None,
    target: Annotated[
        list[str] | None,
        typer.Option(help="GPU architecture: sm_80, sm_90, sm_100 or gfx942. May be given several times."),
    ] = None,
    covering: Annotated[
        bool,
        typer.Option(
            help="Compile only variants that together have every kernel, argument type and flag, about a third of them."
        ),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Compile every variant of every kernel and list the registers, spills and shared memory that it takes.

    Needs Triton, but no GPU. Ends with 1 where a variant does not compile.
    """
    targets = target or ["sm_90"]
    check_known("--target", targets, list(TARGETS))
    _require_compiler()
    from moiety_kernels.gpu.report import operations as all_operations  # noqa: PLC0415 - imports Triton
    from moiety_kernels.gpu.report import table  # noqa: PLC0415

    known = all_operations()
    names = operations or known
    check_known("operation", names, known)
    with _progress() as bar:
        task = bar.add_task("compiling", total=len(targets) * len(names))
        rows = table(targets, names, lambda: bar.update(task, advance=1), covering=covering)
    if as_json:
        settings = {"targets": targets, "operations": names, "covering": covering}
        environment = describe_environment("torch", "triton")
        typer.echo(json.dumps({"environment": environment, "settings": settings, "rows": rows}))
    else:
        _print_report(rows)
    if any(row["error"] for row in rows):
        raise typer.Exit(FAILED)


@app.command("tune")
def tune_command(
    shapes: Annotated[
        str,
        typer.Option(
            help="Names of models whose layers are tuned, separated by commas. If not given, all known models."
        ),
    ] = "",
    layer: Annotated[
        list[str] | None,
        typer.Option(help="Sizes of a further expert layer as E,K,D,F: experts, top-k, model and hidden dimension."),
    ] = None,
    tokens: Annotated[
        str,
        typer.Option(
            help="Numbers of tokens in a step, separated by commas. If not given, the powers of two up to 16384."
        ),
    ] = "",
    weights: Annotated[str, typer.Option(help=f"Weight formats, separated by commas: {', '.join(_WEIGHTS)}.")] = "bf16",
    best: Annotated[
        int, typer.Option(min=1, help="Number of candidates of the cost model that are measured for each case.")
    ] = 4,
    again: Annotated[bool, typer.Option("--again", help="Measure again what has already been tuned.")] = False,
    cache_dir: Annotated[
        Path | None,
        typer.Option(
            envvar=CACHE_VARIABLE,
            file_okay=False,
            help="Folder for the selected variants. Engines find it by this environment variable.",
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Time the best variants for each layer and step size on this GPU, and keep the fastest for all engines here.

    Choices are stored per device and discarded when the kernels or Triton change.
    """
    layers = [known.SHAPES[name] for name in parse_names("--shapes", shapes, tuple(known.SHAPES))]
    layers += [known.layer_of(parse_numbers("--layer", text)) for text in layer or ()]
    sizes = parse_numbers("--tokens", tokens) or tuple(1 << power for power in range(15))
    kinds = parse_names("--weights", weights, _WEIGHTS) or ("bf16",)
    _require_compiler()
    from moiety_kernels.tuning.session import NoGpu, Session  # noqa: PLC0415 - imports torch and Triton

    try:
        session = Session(layers or list(known.MODELS), sizes, kinds, cache_dir)
        with _progress() as bar:
            task = bar.add_task("tuning", total=len(session.problems))
            rows, failed = session.run(best, again=again, on_done=lambda: bar.update(task, advance=1))
    except NoGpu as exc:
        raise failure("kernels tune", str(exc)) from exc
    except OSError as exc:
        raise failure("kernels tune", f"choices cannot be saved: {exc}; set another folder with --cache-dir") from exc
    if as_json:
        environment = describe_environment("torch", "triton") | {"device": session.device_name}
        settings = {"layers": [one.name for one in session.layers], "tokens": sizes, "weights": kinds, "best": best}
        found = {"too_large": session.too_large, "failed": failed, "rows": rows}
        where = str(session.choices.path)
        typer.echo(json.dumps({"environment": environment, "settings": settings, "file": where, **found}))
    else:
        _print_tuned(rows, f"{session.device_name}: kept in {session.choices.path}", session.too_large)
    if failed:
        raise failure("kernels tune", f"{len(failed)} problems have no choice; the first: {failed[0]}")


def standalone() -> None:
    """Run these commands and `bench`, as `python -m moiety_kernels`."""
    app.command("bench")(bench_kernels)
    app(prog_name="python -m moiety_kernels")


def _require_compiler() -> None:
    for package in ("torch", "triton"):
        require_package("kernels", package)
    if os.environ.get("TRITON_INTERPRET") == "1":
        raise failure("kernels", "TRITON_INTERPRET is set, under which nothing is compiled; unset it")


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
        taken = [str(row.get(name, "")) for name in ("registers", "spill_bytes", "shared_bytes")]
        table.add_row(row["operation"], row["variant"], row["target"], *taken)
    Console().print(table)
    for row in rows:
        if row["error"]:
            typer.echo(row["error"])
        elif row["loads_wait"]:
            typer.echo(f"{row['variant']} on {row['target']}: with this Triton some of its loads wait")


def _print_tuned(rows: list[dict[str, Any]], where: str, too_large: list[str]) -> None:
    table = Table()
    for name in ("operation", "problem", "fastest", "µs", "gain", ""):
        table.add_column(name, justify="right" if name in ("µs", "gain") else "left")
    for row in rows:
        gain = f"{row['gain']:.0%}" if row["new"] else ""
        shown = row["operation"], row["problem"], row["name"], f"{row['time_us']:.1f}", gain
        table.add_row(*shown, "" if row["new"] else "as before")
    Console().print(table)
    typer.echo(where)
    if too_large:
        typer.echo(f"too large for the memory that is free: {', '.join(too_large)}")
