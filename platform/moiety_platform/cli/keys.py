"""Commands `moiety key …`. A key's text is shown once, by the command that creates it."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.gateway_client import path_of
from moiety_platform.cli.printing import say
from moiety_platform.cli.tables import show_json

COLUMNS = {
    "id": "id",
    "name": "name",
    "hint": "ends in",
    "role": "role",
    "belongs_to": "of",
    "status": "status",
    "allowed_models": "models",
    "created_at": "created",
    "expires_at": "expires",
}
DEFAULT_PROJECT = "default"

app = typer.Typer(no_args_is_help=True, help="Manage API keys of clients and keys of administrators.")

KeyId = Annotated[str, typer.Argument(help="Id of the key: the part between mty_ and the dot.")]


@app.command("list")
@admin_command
def list_keys(
    admin: Admin,
    tenant: Annotated[str | None, typer.Option(help="Name or id of a tenant. If not given, all tenants.")] = None,
    role: Annotated[
        Role | None, typer.Option(help="Role of administrators' keys. If not given, keys of all roles.")
    ] = None,
) -> None:
    """List keys, oldest first, without their secrets. Those with a role are administrators'."""
    tenant_id = admin.client.find_tenant(tenant)["id"] if tenant is not None else None
    rows = list(admin.client.pages("/keys", tenant_id=tenant_id, role=role))
    shown = [{**row, "belongs_to": row["project_id"] or row["tenant_id"]} for row in rows]
    admin.show_rows(rows if admin.as_json else shown, COLUMNS)


@app.command("create")
@admin_command
def create_key(
    admin: Admin,
    name: Annotated[str, typer.Argument(help="Name of the key.")],
    tenant: Annotated[
        str | None,
        typer.Option(
            help="Name or id of the tenant that the key belongs to, or that an administrator is restricted to."
        ),
    ] = None,
    project: Annotated[
        str, typer.Option(help="Project of the tenant. `default` is created if it does not exist.")
    ] = DEFAULT_PROJECT,
    role: Annotated[
        Role | None,
        typer.Option(
            help="Create an administrator's key with this role. tenant-admin requires --tenant, viewer accepts it."
        ),
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="Name of a model that the key may use. May be given several times. If not given, all models."
        ),
    ] = None,
    expires_in_days: Annotated[
        float | None, typer.Option(min=0.0001, help="Lifetime of the key, in days. If not given, unlimited.")
    ] = None,
) -> None:
    """Create a key for a tenant's clients, or with --role one for an administrator, which only owners may."""
    body: dict[str, Any] = {"name": name, "allowed_models": model or None}
    if role is not None:
        if complaint := tenant_complaint(role, tenant):
            raise typer.BadParameter(complaint)
        tenant_id = None if tenant is None else admin.client.find_tenant(tenant)["id"]
        body |= {"role": role, "tenant_id": tenant_id}
    elif tenant is not None:
        body["project_id"] = find_or_make_project(admin.client, admin.client.find_tenant(tenant)["id"], project)
    else:
        raise typer.BadParameter("give --tenant, --role or both")
    if expires_in_days is not None:
        body["expires_at"] = (datetime.now(UTC) + timedelta(days=expires_in_days)).isoformat()
    show_made(admin.client.call("POST", "/keys", body), admin.as_json)


@app.command("rotate")
@admin_command
def rotate_key(
    admin: Admin,
    key_id: KeyId,
    grace_s: Annotated[
        int | None,
        typer.Option(min=0, help="Time for which the old key remains valid, in seconds. If not given, one day."),
    ] = None,
) -> None:
    """Create a key's successor, with the same rights."""
    body = {} if grace_s is None else {"grace_s": grace_s}
    show_made(admin.client.call("POST", path_of("keys", key_id, "rotate"), body), admin.as_json)


@app.command("revoke")
@admin_command
def revoke_key(
    admin: Admin,
    key_id: KeyId,
) -> None:
    """Revoke a key permanently."""
    admin.show_row(admin.client.call("POST", path_of("keys", key_id, "revoke")))


def find_or_make_project(client: AdminClient, tenant_id: str, name: str) -> str:
    """Return the project's id; a missing `default` is created, so that a tenant's first key needs only one command."""
    if name == DEFAULT_PROJECT and not list(client.pages("/projects", tenant_id=tenant_id, name=name)):
        return str(client.call("POST", "/projects", {"name": name, "tenant_id": tenant_id})["id"])
    return str(client.find_project(tenant_id, name)["id"])


def show_made(made: dict[str, Any], as_json: bool) -> None:
    if as_json:
        show_json(made)
        return
    say(made["secret"])
    say("Keep it now: it is not shown again.", err=True)
