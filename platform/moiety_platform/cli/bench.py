"""Command `moiety bench serve`: options and output of the load generator."""

from __future__ import annotations

import asyncio
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.load import BenchAnswer, BenchTarget, TargetError, find_target, run_load
from moiety_platform.bench.report import slo_targets_of, summarise
from moiety_platform.cli.errors import EXIT_FAILED, CommandError, NotReachable
from moiety_platform.cli.printing import print_line
from moiety_platform.printable import printable
from moiety_wire.class_targets import BadClassTargets, read_classes
from moiety_wire.classes import SHIPPED
from moiety_workload.errors import BadTrace
from moiety_workload.generators import draw_poisson
from moiety_workload.readers import read_trace
from moiety_workload.request import TraceRequest
from moiety_workload.transforms import at_rate, scale_lengths, shorten

DEFAULT_NUM_REQUESTS = 100


def serve(
    key: Annotated[
        list[str],
        typer.Option(
            envvar="MOIETY_KEY",
            help="API key of a tenant, or TENANT=KEY for a tenant of the trace. May be given several times: all keys "
            "are used, in turn where there are more keys than tenants.",
        ),
    ],
    url: Annotated[str, typer.Option(envvar="MOIETY_URL", help="URL of the gateway.")] = "http://127.0.0.1:8000",
    trace: Annotated[
        Path | None,
        typer.Option(help="Trace of requests. If not given, Poisson arrivals of requests with equal lengths."),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Mean number of requests per second. If not given, the arrival times of the trace."
        ),
    ] = None,
    num_requests: Annotated[int | None, typer.Option(min=1, help="Largest number of requests to send.")] = None,
    duration_s: Annotated[
        float | None, typer.Option(min=0.001, help="Longest time during which requests are sent, in seconds.")
    ] = None,
    input_tokens: Annotated[int, typer.Option(min=1, help="Prompt length in tokens without --trace.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, help="Output length in tokens without --trace.")] = 64,
    scale: Annotated[float, typer.Option(min=1e-6, help="Factor that multiplies the lengths of the trace.")] = 1.0,
    model: Annotated[
        str | None, typer.Option(help="Name of the model. If not given, the first one that the gateway lists.")
    ] = None,
    class_targets: Annotated[
        Path | None,
        typer.Option(
            exists=True,
            dir_okay=False,
            help="File with the gateway's classes, whose SLOs count: TOML with a table for each class to change, "
            "or the output of moiety class list --json. If not given, the built-in classes.",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the random prompts and arrivals.")] = 0,
    timeout_s: Annotated[
        float,
        typer.Option(min=0.001, help="Longest time without data after which a request counts as failed, in seconds."),
    ] = 600.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure a running gateway under open-loop load: latencies, SLO attainment by class, goodput, errors.

    Ends with 1 if no request was served, 3 if the gateway does not answer.
    """
    rng = Random(seed)
    try:
        requests = make_requests(rng, trace, rate, num_requests, duration_s, input_tokens, output_tokens, scale)
        targets = slo_targets_of(SHIPPED if class_targets is None else read_classes(class_targets))
    except (BadTrace, BadClassTargets) as exc:
        raise CommandError(str(exc)) from exc
    settings = {
        "url": url, "trace": trace.name if trace else None, "rate": rate, "num_requests": num_requests,
        "duration_s": duration_s, "scale": scale, "input_tokens": None if trace else input_tokens,
        "output_tokens": None if trace else output_tokens, "seed": seed, "timeout_s": timeout_s, "keys": len(key),
        "class_targets": class_targets.name if class_targets else None,
    }  # fmt: skip
    try:
        target, answers = asyncio.run(measure(url.rstrip("/"), key, model, timeout_s, requests, rng))
    except TargetError as exc:
        raise NotReachable(str(exc)) from exc
    figures = summarise(answers, targets)
    keys_used = len(set(target.assign_keys(requests)))
    if keys_used < len(set(key)):
        print_line(f"{keys_used} of {len(set(key))} keys are used: the trace has no requests for the others", err=True)
    settings |= {"model": target.model, "keys_used": keys_used}
    report = {"environment": describe_environment(), "settings": settings, **figures}
    if as_json:
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
    else:
        print_figures(figures)
    if not figures["completed"]:
        raise typer.Exit(EXIT_FAILED)


def make_requests(
    rng: Random,
    trace: Path | None,
    rate: float | None,
    num_requests: int | None,
    duration_s: float | None,
    input_tokens: int,
    output_tokens: int,
    scale: float,
) -> list[TraceRequest]:
    if trace is None:
        if rate is None:
            raise typer.BadParameter("required without --trace", param_hint="--rate")
        count = num_requests or (int(rate * duration_s * 2) + 10 if duration_s else DEFAULT_NUM_REQUESTS)
        return shorten(draw_poisson(rng, rate, count, input_tokens, output_tokens), num_requests, duration_s)
    requests = shorten(read_trace(trace), num_requests, None)
    if rate is not None:
        requests = at_rate(requests, rate)
    return scale_lengths(shorten(requests, None, duration_s), scale)


def parse_keys(values: list[str]) -> tuple[dict[str, str], list[str]]:
    """Return the keys given as `TENANT=KEY`, and those given alone."""
    pairs = [value.rpartition("=") for value in values]
    named = {tenant: key for tenant, separator, key in pairs if separator}
    return named, [key for _, separator, key in pairs if not separator]


async def measure(
    url: str, keys: list[str], model: str | None, timeout_s: float, requests: list[TraceRequest], rng: Random
) -> tuple[BenchTarget, list[BenchAnswer]]:
    target = await find_target(url, *parse_keys(keys), model, timeout_s)
    progress = make_progress()
    with progress or nullcontext():
        task = progress.add_task("requests", total=len(requests)) if progress else None

        def on_end() -> None:
            if progress is not None and task is not None:
                progress.advance(task)

        return target, await run_load(target, requests, rng, on_end)


def make_progress() -> Progress | None:
    """Return a progress bar on a terminal, else None."""
    if not sys.stderr.isatty():
        return None
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    return Progress(*columns, console=Console(stderr=True), transient=True)


def print_figures(figures: dict[str, Any]) -> None:
    console = Console()
    table = Table("", "requests", "attainment", "TTFT p50 / p90 / p99 ms", "TPOT p50 / p90 / p99 ms")
    for name, row in figures["classes"].items():
        table.add_row(
            Text(printable(name)),
            str(row["requests"]),
            f"{row['attainment']:.1%}",
            spread(row["ttft_ms"]),
            spread(row["tpot_ms"]),
        )
    console.print(table)
    console.print(
        f"{figures['completed']} of {figures['requests']} served in {figures['duration_s']:.1f} s; "
        f"{figures['output_tokens_per_s']:.1f} output tokens/s, {figures['goodput_tokens_per_s']:.1f} within SLO; "
        f"end to end {spread(figures['e2e_ms'])} ms"
    )
    for code, count in figures["errors_by_code"].items():
        message = figures["error_messages"][code]
        console.print(Text(f"  {count} × {printable(code)}{': ' if message else ''}{printable(message)}"))


def spread(values: dict[str, float | None]) -> str:
    return " / ".join("–" if value is None else f"{value:.1f}" for value in values.values())
