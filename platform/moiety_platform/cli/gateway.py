"""Command `moiety gateway`: its options, and on request the preparation of the store before the gateway opens it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.auth.bootstrap import ensure_bootstrap
from moiety_platform.auth.pepper import BadPepper, pepper_of
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.migrations import find_upgrade
from moiety_platform.cli.settings_of import open_settings
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.gateway import run_gateway
from moiety_platform.listening import AddressUnavailable
from moiety_platform.live_settings import CannotFollow
from moiety_platform.settings import GatewaySettings
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, FirstKeys, write_first_keys


def gateway(
    host: Annotated[str | None, typer.Option(help="Address to listen on; 127.0.0.1 if not set.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port to listen on; 8000 if not set.")] = None,
    operations_host: Annotated[
        str | None, typer.Option(help="Address of the operations listener; 127.0.0.1 if not set.")
    ] = None,
    operations_port: Annotated[
        int | None,
        typer.Option(
            min=0, max=65535, help="Port for /metrics and /schema; if not set, --port where --host is loopback."
        ),
    ] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="tcp://HOST:PORT or ipc://PATH of an engine, dns+tcp://NAME:PORT of several, or "
            "openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER of another's; repeatable."
        ),
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option(help="Where the key pepper, the usage journal and SQLite are kept.")
    ] = None,
    database_url: Annotated[
        str | None, typer.Option(help="sqlite:///FILE or postgresql://…; SQLite in the data directory if not set.")
    ] = None,
    drain_s: Annotated[int | None, typer.Option(min=0, help="How long a stop waits for running answers.")] = None,
    otlp_endpoint: Annotated[
        str | None, typer.Option(help="Where spans go, such as http://collector:4318; nowhere if not set.")
    ] = None,
    log_level: Annotated[str | None, typer.Option(help="debug, info, warning or error.")] = None,
    log_format: Annotated[str | None, typer.Option(help="auto, json or console.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML or YAML file; its table `gateway` sets these.")] = None,
    migrate: Annotated[bool, typer.Option("--migrate", help="Bring the database up to date first.")] = False,
    first_keys: Annotated[
        Path | None,
        typer.Option(help="Make an admin key and a tenant with a key if this file is missing or the store empty."),
    ] = None,
) -> None:
    """Run the HTTP gateway alone. Each option may also be set in the environment, as MOIETY_PORT for --port.

    A change of the file takes effect within seconds, unless it needs a restart; SIGHUP reads the file at once.

    Ends with 0 after a stop, 1 if it could not start, 2 for a wrong option or setting.
    """
    os.umask(PRIVATE_UMASK)
    flags = {
        "host": host, "port": port, "operations_host": operations_host, "operations_port": operations_port,
        "engines": tuple(engine) if engine else None, "data_dir": data_dir,
        "database_url": database_url, "drain_s": drain_s, "otlp_endpoint": otlp_endpoint,
        "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    source = open_settings(config, **flags)
    settings = source.first
    try:
        if migrate:
            find_upgrade()(settings.store_url)
        if first_keys is not None:
            keys = asyncio.run(ensure_first_keys(settings, reissue=not first_keys.exists()))
            if keys is not None:  # if the store was empty, the keys in the file belong to another store
                write_first_keys(first_keys, keys)
        run_gateway(source)
    except (AddressUnavailable, CannotFollow, BadPepper, BadDatabaseUrl, PlatformError) as exc:
        raise CommandError(str(exc)) from exc


async def ensure_first_keys(settings: GatewaySettings, *, reissue: bool) -> FirstKeys | None:
    """Return new keys for the owner and a first tenant if the store has none, or with `reissue`; else None."""
    pepper = pepper_of(settings)
    database = Database.open(settings.store_url)
    try:
        made = await ensure_bootstrap(database, pepper, SystemClock(), reissue=reissue)
    finally:
        await database.close()
    if made is None:
        return None
    return FirstKeys(admin_key=made.admin_key, tenant=made.tenant_name, tenant_key=made.tenant_key)
