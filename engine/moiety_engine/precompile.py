"""The command `moiety precompile`: compiles the kernels that a model needs before the first start of its engine.

Compiled CPU kernels are kept in the package, or in the user's cache folder. A start finds them there until the package,
the CPU level or the options that choose kernels change. Kernels can be compiled for other CPU levels than that of this
machine, as for an image that runs on many machines.
"""

from __future__ import annotations

import json
import os
import platform
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from multiprocessing import get_context

import typer

from moiety_engine.bench.lengths import fixed_lengths
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.command_errors import exit_on_error
from moiety_engine.logs import configure_logs
from moiety_engine.option_values import engine_config
from moiety_kernels.cpu.compile_progress import progress
from moiety_kernels.cpu.levels import COMPILE_ONLY_VARIABLE, IS_X86, LEVEL_VARIABLE, X86_LEVELS
from moiety_options.commands import command_of
from moiety_options.declaration import option
from moiety_options.model_options import ModelOptions

NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 2, 32, 4  # of the requests that are answered, so that each kernel is used
ALL_LEVELS = "all"


@dataclass(slots=True, kw_only=True)
class PrecompileOptions(ModelOptions):
    """Options of `moiety precompile`: those of the engine that choose its kernels."""

    cpu_levels: str = option(
        "",
        "Compile for these levels of x86 CPUs, separated by commas, instead of for this CPU: all, or some of "
        f"{', '.join(X86_LEVELS)}. This CPU need not have them.",
    )
    as_json: bool = option(False, "Print one JSON object on standard output.", flag="--json")


@dataclass(frozen=True, slots=True)
class CompileFigures:
    """Kernel functions that were compiled, and the time that it took."""

    compiled: int
    seconds: float


def run_precompile(options: PrecompileOptions) -> None:
    """Compile the CPU kernels that a model needs, so that the first start of its engine is short.

    Loads the model and answers two short requests in this process. Give the options with which the engine will run.
    Kernels that are already compiled are loaded. With --cpu-levels, kernels are compiled for other CPUs as well, for
    example in an image.
    """
    configure_logs()
    levels = parse_levels(options.cpu_levels)
    with exit_on_error("moiety precompile"):
        if levels:
            figures = {level: compile_for_level(options, level) for level in levels}
        else:
            figures = {"": compile_here(options)}
    if options.as_json:
        by_level = {"levels": {level: asdict(one) for level, one in figures.items()}} if levels else {}
        typer.echo(json.dumps(asdict(_total(list(figures.values()))) | by_level))
        return
    for level, one in figures.items():
        which = f" for {level}" if level else ""
        typer.echo(f"compiled {one.compiled} kernel functions{which} in {one.seconds:.0f} s")


def parse_levels(given: str) -> list[str]:
    """Return the names of the levels of --cpu-levels; raises BadParameter if there is no such level."""
    names = [name.strip() for name in given.split(",") if name.strip()]
    if names == [ALL_LEVELS]:
        return list(X86_LEVELS)
    if unknown := [name for name in names if name not in X86_LEVELS]:
        message = f"there is no level {unknown[0]!r}; give all, or some of {', '.join(X86_LEVELS)}"
        raise typer.BadParameter(message, param_hint="--cpu-levels")
    if names and not IS_X86:
        message = f"the levels are those of x86, and this processor is {platform.machine()}; leave it out"
        raise typer.BadParameter(message, param_hint="--cpu-levels")
    return names


def compile_for_level(options: PrecompileOptions, level: str) -> CompileFigures:
    """Compile for a CPU level, in a process of its own, because a process compiles for one level."""
    with ProcessPoolExecutor(1, get_context("spawn"), _use_level, (level,)) as process:
        return process.submit(compile_here, options).result()


def compile_here(options: PrecompileOptions) -> CompileFigures:
    """Load the model and answer requests in this process, so that it compiles or loads each kernel."""
    from moiety_engine.bench.engine import measure  # noqa: PLC0415 - imports torch
    from moiety_engine.zeroed_memory import ZeroedMemory  # noqa: PLC0415 - the same

    begin_s = time.perf_counter()
    folder = resolve_checkpoint(options.model)
    config = engine_config(options, folder, folder.name)
    lengths = fixed_lengths(NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS)
    with ZeroedMemory() if os.environ.get(COMPILE_ONLY_VARIABLE) else nullcontext():
        measure(config, lengths, seed=0, on_load=lambda _done, _total: None, on_done=lambda _num: None)
    return CompileFigures(progress.num_compiled, round(time.perf_counter() - begin_s, 3))


def _use_level(level: str) -> None:
    """Let this process compile for a level. Must run before it imports the compiler."""
    os.environ |= {LEVEL_VARIABLE: level, COMPILE_ONLY_VARIABLE: "1"}
    configure_logs()


def _total(figures: list[CompileFigures]) -> CompileFigures:
    return CompileFigures(sum(one.compiled for one in figures), round(sum(one.seconds for one in figures), 3))


precompile = command_of(PrecompileOptions, run_precompile)
