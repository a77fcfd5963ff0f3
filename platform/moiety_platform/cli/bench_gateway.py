"""Command `moiety bench gateway`: options and output."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from moiety_platform.bench.closed_loop import UnexpectedAnswer
from moiety_platform.bench.environment import describe_environment
from moiety_platform.bench.gateway import BenchFailed, GatewayBench, measure_gateway
from moiety_platform.cli.errors import CommandError


def gateway(
    tenants: Annotated[
        int, typer.Option(min=1, help="Number of tenants, each with one key and quotas of every kind.")
    ] = 200,
    connections: Annotated[
        int,
        typer.Option(
            min=1, help="Number of connections, each of which sends its next request when the previous one is answered."
        ),
    ] = 16,
    duration_s: Annotated[
        float, typer.Option(min=0.1, help="Duration of each part of the measurement, in seconds.")
    ] = 10.0,
    output_tokens: Annotated[
        int, typer.Option(min=1, help="Output length of a request without streaming, in tokens.")
    ] = 8,
    stream_tokens: Annotated[int, typer.Option(min=1, help="Output length of a streamed request, in tokens.")] = 1000,
    soak_requests: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of further requests during which the growth of memory is measured, after the first tenth.",
        ),
    ] = 0,
    no_traces: Annotated[bool, typer.Option("--no-traces", help="Do not record traces.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False,
) -> None:
    """Measure the gateway alone, on one core, with the scripted engine and every production feature enabled."""
    settings = GatewayBench(
        tenants, connections, duration_s, output_tokens, stream_tokens, soak_requests, not no_traces
    )
    console = Console(stderr=True)
    print_progress = console.print if sys.stderr.isatty() else lambda _: None
    try:
        figures = measure_gateway(settings, print_progress)
    except (BenchFailed, UnexpectedAnswer, OSError) as exc:
        raise CommandError(str(exc)) from exc
    if as_json:
        chosen = {name: getattr(settings, name) for name in GatewayBench.__slots__}
        report = {"environment": describe_environment(), "settings": chosen, **figures}
        sys.stdout.write(json.dumps(report, indent=2) + "\n")
        return
    table = Table(show_header=False)
    for name, value in figures.items():
        table.add_row(name.replace("_", " "), _shown(value))
    Console().print(table)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_shown(part)}" for name, part in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
