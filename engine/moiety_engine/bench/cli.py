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
from moiety_engine.command_errors import exit_on_error
from moiety_engine.config import EngineConfig
from moiety_engine.logs import configure_logs
from moiety_engine.option_values import engine_config
from moiety_options.commands import command_of
from moiety_options.declaration import option
from moiety_options.model_options import ModelOptions
from moiety_wire.engine_choices import PolicyName


@dataclass(slots=True, kw_only=True)
class BenchOptions(ModelOptions):
    """Options of `moiety bench engine`: the model options, and the measured load."""

    num_prompts: int = option(32, "Number of requests.", min=1)
    input_tokens: int | None = option(
        None, "Prompt length in tokens. If not given, 128, or the prompt lengths of --trace.", min=1
    )
    output_tokens: int = option(64, "Output length in tokens without --trace.", min=1)
    trace: Annotated[
        Path | None, typer.Option(exists=True, dir_okay=False, help="CSV trace to read prompt and output lengths from.")
    ] = None
    scale: float = option(1.0, "Factor that multiplies the lengths of the trace.", min=0.0001)
    calibrate: Path | None = option(
        None,
        "Measure steps of many shapes instead, and write the resulting device to this file, for moiety simulate.",
        dir_okay=False,
    )
    calibrate_s: float = option(120.0, "Approximate duration of the calibration, in seconds.", min=1)
    seed: int = option(0, "Seed of the random prompts.")
    as_json: bool = option(False, "Print one JSON object on standard output.", flag="--json")

    def lengths(self) -> list[BenchLengths]:
        """Return the lengths of each request. Raises EngineError."""
        if self.trace is None:
            return fixed_lengths(self.num_prompts, self.input_tokens or 128, self.output_tokens)
        return trace_lengths(self.trace, self.num_prompts, self.scale, input_tokens=self.input_tokens)


def run_bench_engine(options: BenchOptions) -> None:
    """Measure the offline throughput of the engine in this process, with all requests submitted at once."""
    configure_logs()
    console = Console(stderr=True)
    with exit_on_error("moiety bench engine"):
        lengths = options.lengths()
        folder = resolve_checkpoint(options.model)
        config = engine_config(options, folder, folder.name)
        with Progress(console=console, disable=not console.is_terminal) as progress:
            if options.calibrate is not None:
                _calibrate(options, options.calibrate, config, progress)
                return
            report = _measure(options, config, lengths, progress)
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


@dataclass(slots=True, kw_only=True)
class BenchSchedulerOptions:
    """Options of `moiety bench scheduler`."""

    running: int = option(256, "Number of requests in the batch.", min=1)
    waiting: int = option(10_000, "Number of waiting requests, which stays constant during the measurement.", min=1)
    tenants: int = option(1_000, "Number of tenants that the requests belong to.", min=1)
    policy: PolicyName = option(PolicyName.MOIETY, "Scheduling policy to measure.")
    everything: bool = option(
        False,
        "Measure with expert batching, a host tier, recorded changes of the prefix cache, and tenants' service that is "
        "exchanged with another replica.",
    )
    steps: int = option(500, "Number of scheduling decisions to measure.", min=1)
    seed: int = option(0, "Seed of the random requests.")
    as_json: bool = option(False, "Print one JSON object on standard output.", flag="--json")


def run_bench_scheduler(options: BenchSchedulerOptions) -> None:
    """Measure the time of a scheduling decision when many requests run and very many wait. No model runs."""
    console = Console(stderr=True)
    load = BenchLoad(options.policy.value, options.running, options.waiting, options.tenants, options.everything)
    with (
        exit_on_error("moiety bench scheduler"),
        Progress(console=console, disable=not console.is_terminal) as progress,
    ):
        stepping = progress.add_task("steps", total=None)
        report = measure_scheduler(
            load, steps=options.steps, seed=options.seed, on_step=lambda: progress.advance(stepping)
        )
    if options.as_json:
        typer.echo(json.dumps(report))
        return
    out = Console()
    out.print(f"{report['running']} running, {report['waiting']} waiting, {options.tenants} tenants ({options.policy})")
    names = "decision_us", "decision_cpu_us", "after_launch_us", "total_us", "total_cpu_us", "commit_us", "add_us"
    for name in names:
        if report[name]:
            out.print(name, ", ".join(f"{p} {value:.1f}" for p, value in report[name].items()))
    out.print(
        "median decision by number waiting:", ", ".join(f"{n}: {us:.0f} us" for n, us in report["growth"].items())
    )
    out.print(f"memory a waiting request, besides its tokens: {report['bytes_per_waiting']:.0f} bytes")


bench_scheduler = command_of(BenchSchedulerOptions, run_bench_scheduler)
