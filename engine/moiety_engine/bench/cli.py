"""The commands `moiety bench engine` and `moiety bench scheduler`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from rich.console import Console
from rich.progress import Progress

from moiety_engine.bench.lengths import BenchLengths, fixed_lengths, trace_lengths
from moiety_engine.bench.scheduler import BenchLoad, measure_scheduler
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.command_errors import print_error
from moiety_engine.config import EngineConfig
from moiety_engine.engine_options import ModelOptions
from moiety_engine.errors import EngineError
from moiety_engine.logs import configure_logs
from moiety_engine.option_commands import command_of


@dataclass(slots=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Options of `moiety bench engine`: those of a model, and what is measured."""

    num_prompts: Annotated[int, typer.Option(min=1, help="Requests to send.")] = 32
    input_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt length [128, or the trace's].")] = None
    output_tokens: Annotated[int, typer.Option(min=1, help="Output length, without a trace.")] = 64
    trace: Annotated[Path | None, typer.Option(exists=True, dir_okay=False, help="CSV to take lengths from.")] = None
    scale: Annotated[float, typer.Option(min=0.0001, help="Factor for the trace's lengths.")] = 1.0
    calibrate: Annotated[
        Path | None,
        typer.Option(dir_okay=False, help="Measure steps of many shapes for moiety simulate instead, into this file."),
    ] = None
    calibrate_s: Annotated[float, typer.Option(min=1, help="Approximate duration of a calibration, in seconds.")] = (
        120.0
    )
    seed: Annotated[int, typer.Option(help="Seed of the random prompts.")] = 0
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object on standard output.")] = False

    def lengths(self) -> list[BenchLengths]:
        """Return the lengths of each request. Raises EngineError."""
        if self.trace is None:
            return fixed_lengths(self.num_prompts, self.input_tokens or 128, self.output_tokens)
        return trace_lengths(self.trace, self.num_prompts, self.scale, input_tokens=self.input_tokens)


def run_bench_engine(options: BenchOptions) -> None:
    """Measure the offline throughput of the engine in this process, with all requests submitted at once."""
    configure_logs()
    console = Console(stderr=True)
    try:
        lengths = options.lengths()
        folder = resolve_checkpoint(options.model)
        config = options.engine_config(folder, folder.name)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            if options.calibrate is not None:
                _calibrate(options, options.calibrate, config, progress)
                return
            report = _measure(options, config, lengths, progress)
    except EngineError as exc:
        print_error("moiety bench engine", exc)
        raise typer.Exit(1) from exc
    if options.as_json:
        typer.echo(json.dumps(report))
        return
    out = Console()
    answered = f"{options.num_prompts} requests in {report['wall_s']:.1f} s"
    out.print(f"ready in {report['ready_s']:.1f} s, {answered} ({options.batching})")
    out.print(f"{report['output_tokens_per_s']:.1f} output tokens/s, {report['total_tokens_per_s']:.1f} in all")
    for name in ("ttft_ms", "tpot_ms"):
        if report[name]:
            out.print(name, ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    out.print(f"KV slots allocated but unused: {100 * report['kv_waste_fraction']:.1f} %")


bench_engine = command_of(BenchOptions, run_bench_engine)


def _calibrate(options: BenchOptions, path: Path, config: EngineConfig, progress: Progress) -> None:
    """Measure steps of many shapes, and write the device that they make to the file."""
    from moiety_engine.bench.calibration import calibrate  # noqa: PLC0415 - imports torch

    loading, trials = progress.add_task("loading", total=None), progress.add_task("kinds of steps", total=None)
    found = calibrate(
        config,
        limit_s=options.calibrate_s,
        seed=options.seed,
        on_load=lambda done, total: progress.update(loading, completed=done, total=total),
        on_trial=lambda done, total: progress.update(trials, completed=done, total=total),
    )
    path.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
    wrote = f"wrote {path}, wrong by {found.fit_error:.1%} on average"
    Console().print(f"{wrote}; use it with: moiety simulate --device {path}", soft_wrap=True)


def _measure(
    options: BenchOptions, config: EngineConfig, lengths: list[BenchLengths], progress: Progress
) -> dict[str, Any]:
    from moiety_engine.bench.engine import measure  # noqa: PLC0415 - imports torch

    loading = progress.add_task("loading", total=None)
    requests = progress.add_task("requests", total=options.num_prompts)
    return measure(
        config,
        lengths,
        seed=options.seed,
        on_load=lambda done, total: progress.update(loading, completed=done, total=total),
        on_done=lambda done: progress.update(requests, completed=done),
    )


def bench_scheduler(
    running: Annotated[int, typer.Option(min=1, help="requests in the batch")] = 256,
    waiting: Annotated[int, typer.Option(min=1, help="requests that wait, kept at this number")] = 10_000,
    tenants: Annotated[int, typer.Option(min=1)] = 1_000,
    policy: Annotated[str, typer.Option(help="as of moiety engine --policy")] = "moiety",
    steps: Annotated[int, typer.Option(min=1, help="decisions to time")] = 500,
    seed: Annotated[int, typer.Option()] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object on standard output")] = False,
) -> None:
    """Measure the time of a scheduling decision when many requests run and very many wait. No model runs."""
    console = Console(stderr=True)
    load = BenchLoad(policy, running, waiting, tenants)
    try:
        with Progress(console=console, disable=not console.is_terminal) as progress:
            stepping = progress.add_task("steps", total=None)
            report = measure_scheduler(load, steps=steps, seed=seed, on_step=lambda: progress.advance(stepping))
    except EngineError as exc:
        print_error("moiety bench scheduler", exc)
        raise typer.Exit(1) from exc
    if as_json:
        typer.echo(json.dumps(report))
        return
    out = Console()
    out.print(f"{report['running']} running, {report['waiting']} waiting, {tenants} tenants ({policy})")
    for name in ("decision_us", "commit_us", "add_us"):
        if report[name]:
            out.print(name, ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    out.print(
        "median decision by number waiting:", ", ".join(f"{n}: {us:.0f} us" for n, us in report["growth"].items())
    )
    out.print(f"memory a waiting request, besides its tokens: {report['bytes_per_waiting']:.0f} bytes")
