"""`moiety serve`: the options, and their way to the supervisor. Imports neither the web stack nor torch."""

from __future__ import annotations

import asyncio
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.cli.config_file import take_defaults
from moiety_platform.cli.errors import CommandError
from moiety_platform.supervisor.console import standard_console
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, DataDir
from moiety_platform.supervisor.errors import SupervisorError
from moiety_platform.supervisor.plan import DEMO_NAME, ServeOptions
from moiety_platform.supervisor.ports import claim_port
from moiety_platform.supervisor.serve import serve as run_serve

ENGINE_PANEL = "Engine"


class Device(StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(StrEnum):
    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


class Batching(StrEnum):
    none = "none"
    static = "static"
    dynamic = "dynamic"
    padded = "padded"
    continuous = "continuous"


def serve(
    more: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- ENGINE_OPTIONS", help="Further options of `moiety engine`, after two dashes."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Checkpoint folder or hub id; without it the bundled demo model.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What clients call the model; from --model if not given.")] = None,
    host: Annotated[str, typer.Option(envvar="MOIETY_HOST", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="MOIETY_PORT", min=0, max=65535, help="Port of the API; 0 takes a free one.")
    ] = 8000,
    data_dir: Annotated[
        Path, typer.Option(envvar="MOIETY_DATA_DIR", help="Where the database, the keys and the logs are kept.")
    ] = Path(".moiety"),
    dashboard_port: Annotated[
        int, typer.Option(min=0, max=65535, help="Port of the dashboard; 0 takes a free one.")
    ] = 8501,
    no_dashboard: Annotated[bool, typer.Option("--no-dashboard", help="Leave the dashboard out.")] = False,
    drain_s: Annotated[int, typer.Option(min=0, help="How long a stop waits for running answers.")] = 30,
    config: Annotated[
        Path | None,
        typer.Option(
            callback=take_defaults,
            is_eager=True,
            help="TOML or YAML file; its table `serve` sets these options, `gateway` the gateway's.",
        ),
    ] = None,
    device: Annotated[
        Device | None, typer.Option(rich_help_panel=ENGINE_PANEL, help="Where the model runs; auto if not given.")
    ] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(rich_help_panel=ENGINE_PANEL, help="Type of the weights; auto if not given.")
    ] = None,
    batching: Annotated[
        Batching | None,
        typer.Option(rich_help_panel=ENGINE_PANEL, help="How requests are put into steps; continuous if not given."),
    ] = None,
    max_batch_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ENGINE_PANEL, help="Token budget of one step.")
    ] = None,
    max_running: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ENGINE_PANEL, help="Most sequences in one step.")
    ] = None,
    max_context_tokens: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ENGINE_PANEL, help="Longest prompt and answer together.")
    ] = None,
    kv_memory_bytes: Annotated[
        str | None, typer.Option(rich_help_panel=ENGINE_PANEL, help="Memory for the KV cache, such as 4GiB.")
    ] = None,
    threads: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=ENGINE_PANEL, help="Processor threads of the engine.")
    ] = None,
    scripted: Annotated[
        bool, typer.Option("--scripted", hidden=True, help="The scripted engine, which needs no model; for tests.")
    ] = False,
) -> None:
    """Serve a model to tenants with keys, everything in one go: engine, gateway, dashboard and an embedded database.

    The first start makes an admin key, a tenant and a key for it. Ctrl-C lets running answers end, then stops.
    Ends with 0 after a stop, 1 when it could not start, 2 for a wrong option.
    """
    os.umask(PRIVATE_UMASK)
    engine = {
        "--device": device,
        "--dtype": dtype,
        "--batching": batching,
        "--max-batch-tokens": max_batch_tokens,
        "--max-running": max_running,
        "--max-context-tokens": max_context_tokens,
        "--kv-memory-bytes": kv_memory_bytes,
        "--threads": threads,
    }
    arguments = [str(word) for option, value in engine.items() if value is not None for word in (option, value)]
    try:
        options = ServeOptions(
            host=host,
            port=claim_port(host, port, "--port"),
            dashboard_port=None if no_dashboard else claim_port(host, dashboard_port, "--dashboard-port"),
            model=model,
            name=name or name_of(model),
            drain_s=drain_s,
            config=config,
            engine_arguments=(*arguments, *(["--scripted"] if scripted else []), *(more or [])),
        )
        with DataDir(data_dir) as opened:
            if "MOIETY_KEY_PEPPER" not in os.environ:
                opened.check_pepper()
            asyncio.run(run_serve(options, opened, standard_console()))
    except SupervisorError as exc:
        raise CommandError(str(exc)) from exc


def name_of(model: str | None) -> str:
    """The demo model's name, a folder's last part, or a hub id as it is."""
    if model is None:
        return DEMO_NAME
    return Path(model).resolve().name if Path(model).is_dir() else model
