"""Commands `moiety key list` and `create`, which find tenants and projects first."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Annotated, Any

import typer

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.auth.admin_resource import KEEP_KEY_NOTICE, KEYS
from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.resource_commands import show_secret

DEFAULT_PROJECT = "default"


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
    admin.show_rows(rows if admin.as_json else shown, KEYS.columns)


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
    show_secret(admin, admin.client.call("POST", "/keys", body), KEEP_KEY_NOTICE)


def find_or_make_project(client: AdminClient, tenant_id: str, name: str) -> str:
    """Return the project's id; a missing `default` is created, so that a tenant's first key needs only one command."""
    if name == DEFAULT_PROJECT and not list(client.pages("/projects", tenant_id=tenant_id, name=name)):
        return str(client.call("POST", "/projects", {"name": name, "tenant_id": tenant_id})["id"])
    return str(client.find_project(tenant_id, name)["id"])
