"""The command `moiety precompile`: compiles the kernels that a model needs before the first start of its engine.

Compiled CPU kernels are kept beside the package, or in the user's cache folder. A start finds them there until the
package, the processor or the options that choose kernels change.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass

import typer

from moiety_engine.bench.lengths import fixed_lengths
from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.command_errors import exit_on_error
from moiety_engine.logs import configure_logs
from moiety_engine.option_values import engine_config
from moiety_kernels.cpu.compile_progress import progress
from moiety_options.commands import command_of
from moiety_options.declaration import option
from moiety_options.model_options import ModelOptions

NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS = 2, 32, 4  # of the requests that are answered, so that each kernel is used


@dataclass(slots=True, kw_only=True)
class PrecompileOptions(ModelOptions):
    """Options of `moiety precompile`: those of the engine that choose its kernels."""

    as_json: bool = option(False, "Print one JSON object on standard output.", flag="--json")


def run_precompile(options: PrecompileOptions) -> None:
    """Compile the CPU kernels that a model needs, so that the first start of its engine is short.

    Loads the model and answers two short requests in this process. Give the options with which the engine will run.
    Kernels that are already compiled are loaded.
    """
    configure_logs()
    begin_s = time.perf_counter()
    with exit_on_error("moiety precompile"):
        from moiety_engine.bench.engine import measure  # noqa: PLC0415 - imports torch

        folder = resolve_checkpoint(options.model)
        config = engine_config(options, folder, folder.name)
        lengths = fixed_lengths(NUM_PROMPTS, INPUT_TOKENS, OUTPUT_TOKENS)
        measure(config, lengths, seed=0, on_load=lambda _done, _total: None, on_done=lambda _num: None)
    seconds = time.perf_counter() - begin_s
    if options.as_json:
        typer.echo(json.dumps({"compiled": progress.num_compiled, "seconds": round(seconds, 3)}))
        return
    typer.echo(f"compiled {progress.num_compiled} kernel functions in {seconds:.0f} s")


precompile = command_of(PrecompileOptions, run_precompile)
