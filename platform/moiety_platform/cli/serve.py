"""Command `moiety serve`: from the options to the supervisor. Imports neither the web stack nor torch."""

from __future__ import annotations

import asyncio
import os
import secrets
from pathlib import Path

from moiety_options.commands import arguments_of, command_of
from moiety_options.declaration import declared_options
from moiety_options.engine_options import ServingOptions
from moiety_options.model_options import model_name
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.serve_options import ServeArguments
from moiety_platform.gpu_driver import has_gpu_driver
from moiety_platform.supervisor.console import standard_console
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, DataDir
from moiety_platform.supervisor.errors import SupervisorError
from moiety_platform.supervisor.log_file import LogRotation
from moiety_platform.supervisor.plan import TOKEN_VARIABLE, ServeOptions
from moiety_platform.supervisor.ports import LOOPBACK, OPERATIONS_PORT, claim_port
from moiety_platform.supervisor.serve import serve as supervise
from moiety_wire.engine_choices import DeviceChoice

FORWARDED = ("COMMANDLINE", "DEFAULT_MAP")  # sources of options that the engine cannot read itself


def run_serve(given: ServeArguments) -> None:
    """Serve a model to tenants with keys: engine, gateway, dashboard, trace store and an embedded database.

    The first start creates an admin key, a tenant and a key for it. Ctrl-C lets running requests finish, then stops.

    Ends with 0 after a stop, 1 if it could not start, 2 for a wrong option.
    """
    os.umask(PRIVATE_UMASK)
    host = given.host
    try:
        options = ServeOptions(
            host=host,
            port=claim_port(host, given.port, "--port"),
            dashboard_port=None if given.no_dashboard else claim_port(host, given.dashboard_port, "--dashboard-port"),
            model=given.model or None,
            name=given.name or model_name(given.model),
            drain_s=given.drain_s,
            config=given.config,
            traces_port=None if given.no_traces else claim_port("127.0.0.1", given.traces_port, "--traces-port"),
            operations_host=given.operations_host,
            operations_port=claim_operations_port(host, given.operations_host, given.operations_port),
            traces_token=os.environ.get(TOKEN_VARIABLE) or secrets.token_hex(16),
            hang_timeout_s=given.hang_timeout_s,
            log_rotation=LogRotation(given.log_max_bytes, given.log_max_age_h * 3600, given.log_files),
            engine_arguments=(*engine_arguments(given), *(given.more or [])),
            cpu_slos=runs_on_cpu(given.device),
        )
        run(options, given.data_dir)
    except SupervisorError as exc:
        raise CommandError(str(exc)) from exc


serve = command_of(ServeArguments, run_serve)


def engine_arguments(given: ServeArguments) -> list[str]:
    """Return the command line of the engine's options that serve was given, except its model and name.

    Options from the environment are left out: the engine reads the same variables itself.
    """
    sources = {name: given.context.get_parameter_source(name) for name in declared_options(ServingOptions)}
    names = [name for name, source in sources.items() if source is not None and source.name in FORWARDED]
    return arguments_of(given, [name for name in names if name not in ("model", "name")])


def runs_on_cpu(device: DeviceChoice) -> bool:
    """Return whether an engine with this option will run on a CPU, as far as the machine's drivers tell."""
    return device is DeviceChoice.CPU or (device is DeviceChoice.AUTO and not has_gpu_driver())


def claim_operations_port(host: str, operations_host: str, port: int | None) -> int | None:
    """Return the port of the operations listener; None if the API's port also serves it, which requires loopback."""
    if port is None and host in LOOPBACK:
        return None
    port = OPERATIONS_PORT if port is None else port
    return claim_port(operations_host, port, "--operations-port")


def run(options: ServeOptions, data_dir: Path) -> None:
    """Run until a stop is requested. Raises SupervisorError."""
    with DataDir(data_dir) as opened:
        if "MOIETY_KEY_PEPPER" not in os.environ:
            opened.check_pepper()
        console = standard_console()
        try:
            asyncio.run(supervise(options, opened, console))
        finally:
            console.close()
