"""Commands `moiety cluster …`, which the Jobs and the pods of the Helm chart run."""

from __future__ import annotations

import asyncio
import os
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import ValidationError

from moiety_platform.auth.bootstrap import ensure_owner
from moiety_platform.auth.pepper import BadPepper, pepper_of
from moiety_platform.cli.errors import CommandError
from moiety_platform.cli.printing import print_line
from moiety_platform.clock import SystemClock
from moiety_platform.cluster.deployment import ensure_secrets, put_key
from moiety_platform.cluster.errors import ClusterError
from moiety_platform.cluster.pod_identity import ACCOUNT
from moiety_platform.cluster.secrets_api import SecretsApi
from moiety_platform.cluster.tokenizer import download_tokenizer
from moiety_platform.db.session import Database
from moiety_platform.db.url_errors import BadDatabaseUrl
from moiety_platform.errors import PlatformError
from moiety_platform.settings import GatewaySettings

app = typer.Typer(
    no_args_is_help=True,
    help="Create Secrets and the key of the first owner, and download tokenizers. The pods of the Helm chart run these "
    "commands.",
)

Account = Annotated[
    Path,
    typer.Option("--account", help="Folder with the token, namespace and certificate of the pod.", show_default=False),
]


@app.command("secrets")
def make_secrets(
    name: Annotated[str, typer.Argument(help="Name of the Secret.")],
    database_host: Annotated[
        str | None, typer.Option(help="Host of the bundled database, whose password is also created.")
    ] = None,
    account: Account = ACCOUNT,
) -> None:
    """Create the Secret that a deployment's parts share, or add missing entries. Existing entries never change."""
    try:
        with SecretsApi.of_pod(os.environ, account) as api:
            added = ensure_secrets(api, name, database_host)
    except ClusterError as exc:
        raise CommandError(str(exc)) from exc
    print_line(f"the Secret {name} has all it needs; added: {', '.join(added) or 'nothing'}")


@app.command("owner")
def make_owner(
    name: Annotated[str, typer.Argument(help="Name of the Secret for the key.")],
    reissue: Annotated[
        bool, typer.Option(help="Create another key even if keys exist, for example after the loss of the first one.")
    ] = False,
    account: Account = ACCOUNT,
) -> None:
    """Create the first owner's key in a store without keys, and put it into a Secret as the entry `key`."""
    try:
        settings = GatewaySettings.load()
        pepper = pepper_of(settings)
        with SecretsApi.of_pod(os.environ, account) as api:
            made = asyncio.run(_ensure_owner(settings.store_url, pepper, api, name, reissue=reissue))
    except (ClusterError, BadPepper, BadDatabaseUrl, PlatformError, ValidationError) as exc:
        raise CommandError(str(exc)) from exc
    print_line(f"the owner's key is in the Secret {name}" if made else "the store has keys already; nothing was done")


@app.command("tokenizer")
def fetch_tokenizer(
    hub_id: Annotated[str, typer.Argument(help="Model ID on the Hugging Face Hub.")],
    folder: Annotated[Path, typer.Argument(help="Folder that the files are written to.")],
    revision: Annotated[
        str | None, typer.Option(help="Commit, tag or branch of the model; if not given, the default branch.")
    ] = None,
) -> None:
    """Download the tokenizer of a model from the hub, without its weights, and check that the gateway can use it."""
    try:
        download_tokenizer(hub_id, folder, revision)
    except ClusterError as exc:
        raise CommandError(str(exc)) from exc
    print_line(f"the tokenizer of {hub_id} is in {folder}")


async def _ensure_owner(url: str, pepper: bytes, api: SecretsApi, name: str, *, reissue: bool) -> bool:
    database = Database.open(url)
    try:
        return await ensure_owner(database, pepper, SystemClock(), partial(put_key, api, name), reissue=reissue)
    finally:
        await database.close()
