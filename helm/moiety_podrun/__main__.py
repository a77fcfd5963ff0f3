"""`python -m moiety_podrun --values FILE`: install a release, and run it until Ctrl-C."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from moiety_podrun.cluster import Cluster, values_of
from moiety_podrun.errors import Failed, PodRunError
from moiety_podrun.fake_secrets_api import FakeSecretsApi
from moiety_podrun.forwarding import serve_inside, serve_outside
from moiety_podrun.network import ROUTER
from moiety_podrun.rendering import Release, database_of_ones_own, render

INSIDE = "MOIETY_PODRUN_INSIDE"  # set for the process that has its own namespaces
API_PORT = 443


def main(
    values: Annotated[
        list[Path] | None, typer.Option(exists=True, dir_okay=False, help="A file of values, as helm's; repeatable.")
    ] = None,
    name: Annotated[str, typer.Option(help="Name of the release.")] = "moiety",
    namespace: Annotated[str, typer.Option(help="Namespace of the release.")] = "moiety",
    secret: Annotated[list[str] | None, typer.Option(help="NAME.ENTRY=VALUE of a Secret of yours; repeatable.")] = None,
    database: Annotated[
        str | None,
        typer.Option(
            metavar="SECRET",
            help="Run a PostgreSQL beside the release, and put its address into this Secret, which values name as "
            "database.existingSecret.",
        ),
    ] = None,
    forward: Annotated[
        list[str] | None, typer.Option(help="PORT=SERVICE: pass on what comes to this machine's port; repeatable.")
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Where logs and volumes are; a new one if not given.")] = None,
) -> None:
    """Run the rendered chart, with pods as processes of this machine, until Ctrl-C.

    SIGHUP rolls out all pods again, as an upgrade does.
    """
    try:
        forwards = {service: int(port) for port, _, service in (one.partition("=") for one in forward or ())}
    except ValueError as error:
        raise typer.BadParameter("write --forward PORT=SERVICE, such as 8000=moiety") from error
    place = (folder or Path(tempfile.mkdtemp(prefix="podrun-"))).resolve()
    place.mkdir(parents=True, exist_ok=True)
    given = values_of({}, *(yaml.load(one.read_text(encoding="utf-8"), yaml.CSafeLoader) or {} for one in values or ()))
    try:
        if INSIDE in os.environ:
            asyncio.run(run(place, given, name, namespace, secret or [], database, list(forwards)))
        else:
            words = ["unshare", "--net", "--mount", sys.executable, "-m", "moiety_podrun", *sys.argv[1:]]
            inside = serve_outside([*words, "--folder", str(place)], os.environ | {INSIDE: "1"}, place, forwards)
            raise typer.Exit(asyncio.run(inside))
    except PodRunError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


async def run(
    folder: Path,
    values: dict[str, Any],
    name: str,
    namespace: str,
    secrets: list[str],
    database: str | None,
    forwarded: list[str],
) -> None:
    """Run the release until a signal. Raises PodRunError."""
    release = render(values, name, namespace)
    stop, again = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    loop.add_signal_handler(signal.SIGHUP, again.set)
    with FakeSecretsApi(folder / "account", namespace=namespace, host=ROUTER, port=API_PORT) as api:
        cluster = Cluster(folder, namespace, release.of_kind("NetworkPolicy"), api)
        for one in secrets:
            where, _, value = one.partition("=")
            secret, _, entry = where.partition(".")
            api.store(secret, entry, value.encode())
        try:
            if database is not None:
                await cluster.keep_database(database_of_ones_own(namespace), api, database)
            await cluster.bring_in(release, api)
            write_secrets(api, folder / "secrets")
            typer.echo(f"everything is ready; logs are in {folder}/pods, Secrets in {folder}/secrets")
            scaling = asyncio.create_task(cluster.follow_scales(api), name="scales")
            servers = [await serve_inside(cluster.services, folder, service) for service in forwarded]
            while not stop.is_set():
                await _either(stop, again)
                if again.is_set():
                    again.clear()
                    await _upgrade(cluster, render(values, name, namespace, upgrade=True), api)
            scaling.cancel()
            await asyncio.wait([scaling])
            for server in servers:
                server.close()
        finally:
            await cluster.close()


async def _upgrade(cluster: Cluster, release: Release, api: FakeSecretsApi) -> None:
    """Upgrade the release; after a failed hook or pod the rest keeps running, as with Helm."""
    try:
        await cluster.bring_in(release, api)
    except (Failed, TimeoutError) as error:
        typer.echo(f"the upgrade failed: {error}")
    else:
        typer.echo("everything was rolled out anew")


def write_secrets(api: FakeSecretsApi, folder: Path) -> None:
    """Write Secrets as files that only their owner can read, NAME/ENTRY, with the contents of `kubectl get secret`."""
    for name, document in api.secrets.items():
        (folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        for entry, value in document["data"].items():
            path = folder / name / entry
            path.touch(mode=0o600)
            path.write_bytes(base64.b64decode(value))


async def _either(*events: asyncio.Event) -> None:
    waits = [asyncio.create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


if __name__ == "__main__":
    typer.run(main)
