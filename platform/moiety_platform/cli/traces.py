"""Command `moiety traces`: options of the trace store, and on request the creation of its tables."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.migrations import find_upgrade
from moiety_platform.cli.setting_options import setting_option
from moiety_platform.config_file import ConfigFileError
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.listening import AddressUnavailable
from moiety_platform.reloading.source import SettingsSource
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK
from moiety_platform.trace_receiver.process import run_trace_store
from moiety_platform.trace_receiver.settings import SECTION, TraceSettings


def traces(
    host: Annotated[str | None, setting_option(TraceSettings, "traces_host")] = None,
    port: Annotated[int | None, setting_option(TraceSettings, "traces_port")] = None,
    data_dir: Annotated[Path | None, setting_option(TraceSettings, "data_dir")] = None,
    database_url: Annotated[str | None, setting_option(TraceSettings, "database_url")] = None,
    log_level: Annotated[str | None, setting_option(TraceSettings, "log_level")] = None,
    log_format: Annotated[str | None, setting_option(TraceSettings, "log_format")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML or YAML configuration file. Its table `traces` has the settings.")
    ] = None,
    migrate: Annotated[bool, typer.Option("--migrate", help="Migrate the database to this version first.")] = False,
) -> None:
    """Run the trace store alone: it receives spans by OTLP/HTTP from clients with a token, for the admin API.

    MOIETY_TRACES_TOKEN must be set to the same value as at the gateways. Each setting can also be set in the
    environment, such as MOIETY_TRACES_PORT for --port.

    Ends with 0 after a stop, 1 if it could not start, 2 for a wrong option or setting.
    """
    os.umask(PRIVATE_UMASK)
    flags = {
        "traces_host": host, "traces_port": port, "data_dir": data_dir, "database_url": database_url,
        "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    try:
        load = partial(TraceSettings.load, config, **flags)
        source = SettingsSource.open(config, SECTION, load, [name for name, one in flags.items() if one is not None])
    except ConfigFileError as exc:
        raise typer.BadParameter(str(exc)) from exc
    except ValidationError as exc:
        raise typer.BadParameter("; ".join(map(explain, exc.errors(include_input=False)))) from exc
    try:
        if migrate:
            find_upgrade()(source.first.store_url)
        run_trace_store(source)
    except (AddressUnavailable, BadDatabaseUrl, PlatformError) as exc:
        raise CommandError(str(exc)) from exc


def explain(problem: ErrorDetails) -> str:
    """Return the problem of a setting; for the one without a default, what to set."""
    name = ".".join(map(str, problem["loc"]))
    if problem["type"] == "missing":
        return f"set MOIETY_{name.upper()} to a random text of 16 characters or more, the same as at the gateways"
    return f"{name}: {problem['msg']}"
