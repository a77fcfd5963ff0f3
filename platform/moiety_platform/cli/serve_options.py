"""Options of `moiety serve`: its own, and those of the engine that it starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from moiety_options.declaration import option
from moiety_options.engine_options import ServingOptions
from moiety_platform.cli.config_file import take_defaults


@dataclass(slots=True, kw_only=True)
class ServeArguments(ServingOptions):
    """Arguments of `moiety serve`. Its own options are first in `--help`, since they have no panel."""

    context: typer.Context
    more: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="-- ENGINE_OPTIONS",
            help="Options of `moiety engine` that serve does not have itself, after two dashes.",
        ),
    ] = None
    host: str = option("127.0.0.1", "Address at which the API listens.", env="MOIETY_HOST")
    port: int = option(
        8000, "Port at which the API listens; 0 selects a free one.", env="MOIETY_PORT", min=0, max=65535
    )
    operations_host: str = option(
        "127.0.0.1", "Address at which the operations endpoints listen.", env="MOIETY_OPERATIONS_HOST"
    )
    operations_port: int | None = option(
        None,
        "Port of the operations endpoints /metrics and /schema, which need no key; 0 selects a free one. If not given, "
        "the value of --port where --host is a loopback address, otherwise 8002.",
        env="MOIETY_OPERATIONS_PORT",
        min=0,
        max=65535,
    )
    data_dir: Path = option(Path(".moiety"), "Folder for the database, the keys and the logs.", env="MOIETY_DATA_DIR")
    dashboard_port: int = option(8501, "Port of the dashboard; 0 selects a free one.", min=0, max=65535)
    no_dashboard: bool = option(False, "Do not start the dashboard.", flag="--no-dashboard")
    traces_port: int = option(
        0, "Port of the trace store, which receives spans by OTLP; 0 selects a free one.", min=0, max=65535
    )
    no_traces: bool = option(False, "Do not start the trace store.", flag="--no-traces")
    drain_s: int = option(30, "Longest time that a stop waits for running requests to finish, in seconds.", min=0)
    hang_timeout_s: float = option(
        30.0,
        "Time after which a process that no longer responds is killed and started again, in seconds; 0: never.",
        min=0,
    )
    log_max_bytes: int = option(
        16 << 20,
        "Size at which the log file of a process is rotated, such as 50MiB; at least 4KiB.",
        min=4096,
        is_size=True,
    )
    log_max_age_h: float = option(
        0.0, "Age at which the log file of a process is rotated, in hours; 0: it is rotated by size only.", min=0
    )
    log_files: int = option(5, "Number of rotated log files of each process that are kept.", min=0, max=1000)
    config: Annotated[
        Path | None,
        typer.Option(
            callback=take_defaults,
            is_eager=True,
            help="TOML or YAML configuration file. Its table `serve` sets these options, `gateway` and `traces` those "
            "of the gateway and the trace store.",
        ),
    ] = None
