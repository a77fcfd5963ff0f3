"""`moiety key …`. A key's text is shown once, by the command that makes it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.cli.admin_client import DEFAULT_DATA_DIR, AdminClient, AdminKey, AsJson, DataDirOption, Url
from moiety_platform.cli.tables import show_json, show_row, show_rows

COLUMNS = {
    "id": "id",
    "name": "name",
    "hint": "ends in",
    "scopes": "scopes",
    "status": "status",
    "allowed_models": "models",
    "created_at": "created",
    "expires_at": "expires",
}
DEFAULT_PROJECT = "default"

app = typer.Typer(no_args_is_help=True, help="Keys: what clients and administrators show to be let in.")

KeyId = Annotated[str, typer.Argument(help="Id of the key: what stands between mty_ and the dot.")]


@app.command("list")
def list_keys(
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant (name or id).")] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Keys, oldest first, without their secrets."""
    client = AdminClient.connect(url, admin_key, data_dir)
    tenant_id = client.find_tenant(tenant)["id"] if tenant is not None else None
    show_rows(list(client.pages("/keys", tenant_id=tenant_id)), COLUMNS, as_json)


@app.command("create")
def create_key(
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    tenant: Annotated[str | None, typer.Option(help="Whose key it is (name or id).")] = None,
    project: Annotated[str, typer.Option(help="The tenant's project; `default` is made if missing.")] = DEFAULT_PROJECT,
    admin: Annotated[bool, typer.Option("--admin", help="An administrator's key, of no tenant.")] = False,
    model: Annotated[list[str] | None, typer.Option(help="A model it may use; repeatable; all if not given.")] = None,
    expires_in_days: Annotated[float | None, typer.Option(min=0.0001, help="Never, if not given.")] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a key for a tenant, or with --admin one for an administrator."""
    if admin == (tenant is not None):
        raise typer.BadParameter("give either --tenant or --admin")
    client = AdminClient.connect(url, admin_key, data_dir)
    body: dict[str, Any] = {"name": name, "allowed_models": model or None}
    if tenant is not None:
        body["project_id"] = find_or_make_project(client, client.find_tenant(tenant)["id"], project)
    if expires_in_days is not None:
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=expires_in_days)).isoformat()
    show_made(client.call("POST", "/keys", body), as_json)


@app.command("rotate")
def rotate_key(
    key_id: KeyId,
    grace_s: Annotated[
        int | None, typer.Option(min=0, help="How long the old one still works; a day if not given.")
    ] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a key's successor, with the same rights."""
    client = AdminClient.connect(url, admin_key, data_dir)
    body = {} if grace_s is None else {"grace_s": grace_s}
    show_made(client.call("POST", f"/keys/{key_id}/rotate", body), as_json)


@app.command("revoke")
def revoke_key(
    key_id: KeyId,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a key useless, for good."""
    show_row(AdminClient.connect(url, admin_key, data_dir).call("POST", f"/keys/{key_id}/revoke"), as_json)


def find_or_make_project(client: AdminClient, tenant_id: str, name: str) -> str:
    """The project's id; a tenant's first key should not need a second command, so `default` is made if missing."""
    if name == DEFAULT_PROJECT and not list(client.pages("/projects", tenant_id=tenant_id, name=name)):
        return str(client.call("POST", "/projects", {"name": name, "tenant_id": tenant_id})["id"])
    return str(client.find_project(tenant_id, name)["id"])


def show_made(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    typer.echo(made["secret"])
    typer.echo("Keep it now: it is not shown again.", err=True)
