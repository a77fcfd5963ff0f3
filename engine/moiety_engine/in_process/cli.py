"""The command `moiety batch run`: creates the engine for a file of requests.

The package that implements the API parses the lines; an entry point finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from moiety_engine.checkpoint import resolve_checkpoint
from moiety_engine.command_errors import exit_on_error
from moiety_engine.config import EngineConfig
from moiety_engine.errors import InvalidConfig
from moiety_engine.logs import configure_logs
from moiety_engine.option_values import engine_config
from moiety_options.commands import command_of
from moiety_options.declaration import option
from moiety_options.model_options import ServedModelOptions, model_name
from moiety_text.errors import UnknownFormat
from moiety_text.reasoning_formats import check_reasoning_format
from moiety_text.tools.registry import check_tool_format
from moiety_wire.replica import Replica

OFFLINE_GROUP = "moiety.offline"  # its entry point `run_file` answers a file with the replica that it is given


@dataclass(slots=True, kw_only=True)
class BatchRunOptions(ServedModelOptions):
    """Options of `moiety batch run`: those of a model, and the files."""

    file: Annotated[
        Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="File of requests, one per line.")
    ]
    output: Path | None = option(
        None,
        "File for the answers, one per line. If not given, FILE with the suffix .answers.jsonl.",
        dir_okay=False,
    )
    as_json: bool = option(False, "Print one JSON object on standard output.", flag="--json")


def run_batch(options: BatchRunOptions) -> None:
    """Answer a file of requests without a server, by an engine in this process.

    The lines have the format of `moiety batch submit`; one file may use several endpoints. Each answer is written when
    it is complete. After an interruption, the same command continues with the lines that have no answer yet.
    """
    configure_logs()
    run_file = _find_run_file()
    with exit_on_error("moiety batch run"):
        _check_formats(options)
        name = options.name or model_name(options.model)
        config = engine_config(options, resolve_checkpoint(options.model), name, traced_steps_per_s=0.0)
        run_file(
            options.file,
            options.output,
            model=config.name,
            open_replica=lambda: _open_replica(config, options),
            as_json=options.as_json,
        )


batch_run = command_of(BatchRunOptions, run_batch)


def _check_formats(options: BatchRunOptions) -> None:
    """Raise InvalidConfig for the name of a format that does not exist."""
    try:
        check_tool_format(options.tool_format)
        check_reasoning_format(options.reasoning_format)
    except UnknownFormat as exc:
        raise InvalidConfig(str(exc)) from exc


def _open_replica(config: EngineConfig, options: BatchRunOptions) -> Replica:
    from moiety_engine.in_process.replica import InProcessReplica  # noqa: PLC0415 - imports torch

    console = Console(stderr=True)
    with Progress(console=console, disable=not console.is_terminal, transient=True) as progress:
        loading = progress.add_task("loading", total=None)
        return InProcessReplica(
            config,
            on_load=lambda done, total: progress.update(loading, completed=done, total=total),
            tool_format=options.tool_format,
            reasoning_format=options.reasoning_format,
        )


def _find_run_file() -> Callable[..., Any]:
    found = entry_points(group=OFFLINE_GROUP, name="run_file")
    if not found:
        typer.echo("Error: no installed package implements the API's requests; reinstall moiety", err=True)
        raise typer.Exit(1)
    loaded: Callable[..., Any] = next(iter(found)).load()
    return loaded
