"""Command `moiety gateway`: its options, and on request the preparation of the store before the gateway opens it."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from moiety_platform.auth.bootstrap import ensure_bootstrap
from moiety_platform.auth.pepper import BadPepper, pepper_of
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.migrations import find_upgrade
from moiety_platform.cli.setting_options import setting_option
from moiety_platform.cli.settings_of import open_settings
from moiety_platform.clock import SystemClock
from moiety_platform.db.session import Database
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.gateway import run_gateway
from moiety_platform.listening import AddressUnavailable
from moiety_platform.live_settings import CannotApplySetting
from moiety_platform.receipts.signing import BadReceiptKey
from moiety_platform.settings import GatewaySettings
from moiety_platform.supervisor.data_dir import PRIVATE_UMASK, FirstKeys, write_first_keys
from moiety_wire.classes import CPU_SLOS, ServiceClass


def gateway(
    host: Annotated[str | None, setting_option(GatewaySettings, "host")] = None,
    port: Annotated[int | None, setting_option(GatewaySettings, "port")] = None,
    operations_host: Annotated[str | None, setting_option(GatewaySettings, "operations_host")] = None,
    operations_port: Annotated[int | None, setting_option(GatewaySettings, "operations_port")] = None,
    engine: Annotated[
        list[str] | None,
        typer.Option(
            help="Address of an engine: tcp://HOST:PORT or ipc://PATH, dns+tcp://NAME:PORT for several engines, or "
            "openai+http://HOST:PORT/v1?model=NAME&kind=KIND&tokenizer=FOLDER for an external engine. May be given "
            "several times."
        ),
    ] = None,
    data_dir: Annotated[Path | None, setting_option(GatewaySettings, "data_dir")] = None,
    database_url: Annotated[str | None, setting_option(GatewaySettings, "database_url")] = None,
    object_store_url: Annotated[str | None, setting_option(GatewaySettings, "object_store_url")] = None,
    drain_s: Annotated[int | None, setting_option(GatewaySettings, "drain_s")] = None,
    otlp_endpoint: Annotated[str | None, setting_option(GatewaySettings, "otlp_endpoint")] = None,
    log_level: Annotated[str | None, setting_option(GatewaySettings, "log_level")] = None,
    log_format: Annotated[str | None, setting_option(GatewaySettings, "log_format")] = None,
    config: Annotated[
        Path | None, typer.Option(help="TOML or YAML configuration file. Its table `gateway` has the settings.")
    ] = None,
    migrate: Annotated[bool, typer.Option("--migrate", help="Migrate the database to this version first.")] = False,
    first_keys: Annotated[
        Path | None,
        typer.Option(
            help="File for an admin key and the key of a first tenant, which are created if the file does not exist or "
            "the database is empty."
        ),
    ] = None,
    cpu_slos: Annotated[
        bool,
        typer.Option(
            "--cpu-slos",
            help="With --first-keys and an empty database: give the classes priority and standard longer SLOs, for "
            "engines on CPUs.",
        ),
    ] = False,
) -> None:
    """Run the HTTP gateway alone. Each setting can also be set in the environment, such as MOIETY_PORT for --port.

    A change of the configuration file takes effect within seconds, unless it needs a restart; SIGHUP reads it at once.

    Ends with 0 after a stop, 1 if it could not start, 2 for a wrong option or setting.
    """
    if cpu_slos and first_keys is None:
        raise typer.BadParameter(
            "it is for the start that creates the first keys; give --first-keys", param_hint="--cpu-slos"
        )
    os.umask(PRIVATE_UMASK)
    flags = {
        "host": host, "port": port, "operations_host": operations_host, "operations_port": operations_port,
        "engines": tuple(engine) if engine else None, "data_dir": data_dir,
        "database_url": database_url, "object_store_url": object_store_url,
        "drain_s": drain_s, "otlp_endpoint": otlp_endpoint,
        "log_level": log_level, "log_format": log_format,
    }  # fmt: skip
    source = open_settings(config, **flags)
    settings = source.first
    try:
        if migrate:
            find_upgrade()(settings.store_url)
        if first_keys is not None:
            slos = CPU_SLOS if cpu_slos else ()
            keys = asyncio.run(ensure_first_keys(settings, reissue=not first_keys.exists(), slos=slos))
            if keys is not None:  # if the store was empty, the keys in the file belong to another store
                write_first_keys(first_keys, keys)
        run_gateway(source)
    except (AddressUnavailable, CannotApplySetting, BadPepper, BadReceiptKey, BadDatabaseUrl, PlatformError) as exc:
        raise CommandError(str(exc)) from exc


async def ensure_first_keys(
    settings: GatewaySettings, *, reissue: bool, slos: Iterable[ServiceClass] = ()
) -> FirstKeys | None:
    """Return new keys for the owner and a first tenant if the store has none, or with `reissue`; else None.

    The built-in classes of an empty store get the SLOs in `slos`.
    """
    pepper = pepper_of(settings)
    database = Database.open(settings.store_url)
    try:
        made = await ensure_bootstrap(database, pepper, SystemClock(), reissue=reissue, slos=slos)
    finally:
        await database.close()
    if made is None:
        return None
    return FirstKeys(admin_key=made.admin_key, tenant=made.tenant_name, tenant_key=made.tenant_key)
