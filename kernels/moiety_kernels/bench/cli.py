"""The command `moiety bench kernels`. It imports torch only when it is called."""

from __future__ import annotations

import functools
import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from moiety_kernels.bench import shapes as known
from moiety_kernels.environment import describe_environment
from moiety_kernels.files import write_whole
from moiety_kernels.options import failure, parse_names, parse_numbers, require_package

if TYPE_CHECKING:
    import torch

    from moiety_kernels.bench.run import Report, Settings


def bench_kernels(
    kernels: Annotated[str, typer.Option(help="Names of kernels, separated by commas. If not given, all.")] = "",
    shapes: Annotated[
        str,
        typer.Option(
            help="Names of models whose shapes are measured, separated by commas. If not given, all that fit the "
            "device."
        ),
    ] = "",
    tokens: Annotated[
        str,
        typer.Option(
            help="Numbers of tokens in a step, separated by commas. If not given, 1 to 16384 on a GPU and 1 to 256 on "
            "a CPU."
        ),
    ] = "",
    routing: Annotated[
        str, typer.Option(help="Distribution of tokens over experts: uniform, zipf, or both separated by a comma.")
    ] = "uniform,zipf",
    device: Annotated[str, typer.Option(help="Device to measure: auto, cpu or cuda.")] = "auto",
    time_budget_s: Annotated[
        float, typer.Option(min=1.0, help="Longest duration of the whole measurement, in seconds.")
    ] = 300.0,
    rivals: Annotated[
        bool, typer.Option("--rivals/--no-rivals", help="Measure other implementations of the same operations as well.")
    ] = True,
    threads: Annotated[int | None, typer.Option(min=1, help="Number of CPU threads.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random inputs.")] = 0,
    output: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="File to which the JSON is also written, after each measurement."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Compare the kernels with other implementations and with the device's roofline in one run.

    Calls run with cold caches and interleaved repeats; times are medians.
    """
    require_package("bench kernels", "torch")
    import torch  # noqa: PLC0415 - seconds, and not installed everywhere

    from moiety_kernels.bench.run import run  # noqa: PLC0415

    if output is not None and not output.parent.is_dir():
        raise typer.BadParameter(f"--output {output}: there is no folder {output.parent}; make it first")
    if threads is not None:
        torch.set_num_threads(threads)
    chosen = _device(device)
    settings = _settings(chosen, kernels, shapes, tokens, routing, time_budget_s, rivals, seed)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    describe = partial(_as_json, settings=settings, device=chosen, time_budget_s=time_budget_s)

    def show(name: str, so_far: Report) -> None:
        bar.update(task, advance=1, description=name)
        if output is not None:
            write_whole(output, json.dumps(describe(so_far)) + "\n")

    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("measuring the device", total=settings.num_points)
        report = run(settings, chosen, show)
    text = json.dumps(describe(report))
    if output is not None:
        write_whole(output, text + "\n")
    if as_json:
        typer.echo(text)
    else:
        _print(report)
    if report.failed:
        one = report.failed[0]
        where = f"{one['kernel']} of {one['shape']} at {one['tokens']} tokens"
        raise failure("bench kernels", f"{len(report.failed)} points failed, the first {where}: {one['error']}")


def _settings(
    device: torch.device,
    kernels: str,
    shapes: str,
    tokens: str,
    routing: str,
    time_budget: float,
    rivals: bool,
    seed: int,
) -> Settings:
    from moiety_kernels.bench.run import KERNELS, Settings  # noqa: PLC0415

    on_gpu = device.type == "cuda"
    usual = known.MODELS if on_gpu else known.SMALL
    numbers = known.TOKENS if on_gpu else known.SMALL_TOKENS
    return Settings(
        kernels=parse_names("--kernels", kernels, KERNELS) or KERNELS,
        shapes=tuple(known.SHAPES[name] for name in parse_names("--shapes", shapes, tuple(known.SHAPES))) or usual,
        tokens=parse_numbers("--tokens", tokens) or numbers,
        routings=parse_names("--routing", routing, known.ROUTINGS) or known.ROUTINGS,
        time_budget_s=time_budget,
        rivals=rivals,
        seed=seed,
    )


def _device(name: str) -> torch.device:
    import torch  # noqa: PLC0415 - see above

    if name not in ("auto", "cpu", "cuda"):
        raise typer.BadParameter(f"--device is auto, cpu or cuda, not {name!r}")
    has_gpu = torch.cuda.is_available()
    if name == "cuda" and not has_gpu:
        raise typer.BadParameter("--device cuda: torch sees no GPU here; use --device cpu, or a CUDA build of torch")
    return torch.device("cuda" if has_gpu and name != "cpu" else "cpu")


def _as_json(report: Report, settings: Settings, device: torch.device, time_budget_s: float) -> dict[str, Any]:
    import torch  # noqa: PLC0415 - see above

    environment = _environment() | {
        "device": report.device,
        "threads": torch.get_num_threads(),
        "cuda": torch.version.cuda,
    }
    return {
        "environment": environment,
        "settings": {
            "device": device.type,
            "kernels": settings.kernels,
            "shapes": [shape.name for shape in settings.shapes],
            "tokens": settings.tokens,
            "routings": settings.routings,
            "time_budget_s": time_budget_s,
            "rivals": settings.rivals,
            "seed": settings.seed,
        },
        "roofline": report.roofline,
        "rows": report.rows,
        "failed": report.failed,
        "skipped": report.skipped,
    }


@functools.cache
def _environment() -> dict[str, Any]:
    return describe_environment("torch", "triton", "transformers", "vllm", "numba")


def _print(report: Report) -> None:
    table = Table(title=f"{report.device}; roofline {report.roofline['source']}")
    for name in ("kernel", "shape", "tokens", "routing", "µs", "TFLOP/s", "GB/s", "of roofline", "fastest rival"):
        table.add_column(name, justify="left" if name in ("kernel", "shape", "routing", "fastest rival") else "right")
    for row in report.rows:
        rival = min(row["rivals"].items(), key=lambda item: item[1], default=None)
        table.add_row(
            row["kernel"],
            row["shape"],
            str(row["tokens"]),
            row["routing"] or "",
            f"{row['time_us']:.1f}",
            f"{row['tflops']:.2f}",
            f"{row['gb_per_s']:.1f}",
            f"{row['roofline_fraction']:.0%}",
            "" if rival is None else f"{rival[0]} {rival[1]:.1f}",
        )
    console = Console()
    console.print(table)
    for one in report.skipped:
        at = ", ".join(str(count) for count in one["tokens"])
        console.print(f"not measured: {one['kernel']} of {one['shape']} at {at}: {one['reason']}", highlight=False)
