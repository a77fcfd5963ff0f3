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
    tenants: Annotated[int, typer.Option(min=1, help="Tenants, each with a key and limits of every kind.")] = 200,
    connections: Annotated[int, typer.Option(min=1, help="Connections that send as fast as they are answered.")] = 16,
    seconds: Annotated[float, typer.Option(min=0.1, help="Length of each part of the run.")] = 10.0,
    output_tokens: Annotated[int, typer.Option(min=1, help="Of an answer that is not streamed.")] = 8,
    stream_tokens: Annotated[int, typer.Option(min=1, help="Of a streamed answer.")] = 1000,
    soak_requests: Annotated[
        int, typer.Option(min=0, help="Then so many requests more, to see how memory grows after a tenth of them.")
    ] = 0,
    no_traces: Annotated[bool, typer.Option("--no-traces", help="Neither record nor keep traces.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on standard output.")] = False,
) -> None:
    """Measure the gateway alone, on one core, with the scripted engine and every production feature enabled."""
    settings = GatewayBench(tenants, connections, seconds, output_tokens, stream_tokens, soak_requests, not no_traces)
    console = Console(stderr=True)
    say = console.print if sys.stderr.isatty() else lambda _: None
    try:
        figures = measure_gateway(settings, say)
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
