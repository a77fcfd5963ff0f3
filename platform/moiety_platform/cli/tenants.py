"""Commands `moiety tenant …` and `moiety project …`: tenants and their projects."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.gateway_client import path_of

PAUSE_S = 1.0  # between polls of an erasure

TENANT_COLUMNS = {
    "name": "name",
    "service_class": "class",
    "weight": "weight",
    "status": "status",
    "speculative_prefill": "speculative_prefill",
    "created_at": "created",
    "id": "id",
}
PROJECT_COLUMNS = {"name": "name", "tenant_id": "tenant", "created_at": "created", "id": "id"}

tenant_app = typer.Typer(
    no_args_is_help=True, help="List, create and change tenants: their service classes and weights."
)
project_app = typer.Typer(
    no_args_is_help=True, help="List and create the projects of a tenant, which its keys belong to."
)

Name = Annotated[str, typer.Argument(help="Name or id of the tenant.")]
ServiceClass = Annotated[
    str | None,
    typer.Option("--class", help="Best service class that the tenant may use, as moiety class list shows it."),
]
Weight = Annotated[
    float | None,
    typer.Option(
        help="Weight of the tenant in fair sharing with the other tenants of its class. The usual weight is 1."
    ),
]

SpeculativePrefillOption = Annotated[
    str | None,
    typer.Option(
        "--speculative-prefill",
        help="Speculative prefill of the likely next turns of conversations by idle engines: off, free, or charged (at "
        "the price of prompt tokens).",
    ),
]


@tenant_app.command("list")
@admin_command
def list_tenants(admin: Admin) -> None:
    """List all tenants, oldest first."""
    admin.show_rows(list(admin.client.pages("/tenants")), TENANT_COLUMNS)


@tenant_app.command("show")
@admin_command
def show_tenant(
    admin: Admin,
    name: Name,
) -> None:
    """Show one tenant."""
    admin.show_row(admin.client.find_tenant(name))


@tenant_app.command("create")
@admin_command
def create_tenant(
    admin: Admin,
    name: Annotated[str, typer.Argument(help="Name of the new tenant.")],
    service_class: ServiceClass = None,
    weight: Weight = None,
    speculative_prefill: SpeculativePrefillOption = None,
) -> None:
    """Create a tenant."""
    chosen = {"service_class": service_class, "weight": weight, "speculative_prefill": speculative_prefill}
    body = {"name": name, **{field: value for field, value in chosen.items() if value is not None}}
    admin.show_row(admin.client.call("POST", "/tenants", body))


@tenant_app.command("change")
@admin_command
def change_tenant(
    admin: Admin,
    name: Name,
    new_name: Annotated[str | None, typer.Option("--name", help="New name of the tenant.")] = None,
    service_class: ServiceClass = None,
    weight: Weight = None,
    speculative_prefill: SpeculativePrefillOption = None,
) -> None:
    """Change a tenant's name, class, weight or speculative prefill."""
    chosen = {
        "name": new_name,
        "service_class": service_class,
        "weight": weight,
        "speculative_prefill": speculative_prefill,
    }
    change = {field: value for field, value in chosen.items() if value is not None}
    if not change:
        raise typer.BadParameter("nothing to change; give --name, --class, --weight or --speculative-prefill")
    admin.show_row(admin.client.call("PATCH", path_of("tenants", admin.client.find_tenant(name)["id"]), change))


@tenant_app.command("suspend")
@admin_command
def suspend_tenant(
    admin: Admin,
    name: Name,
) -> None:
    """Suspend a tenant: its keys are refused until it is resumed."""
    tenant_id = admin.client.find_tenant(name)["id"]
    admin.show_row(admin.client.call("PATCH", path_of("tenants", tenant_id), {"status": "suspended"}))


@tenant_app.command("resume")
@admin_command
def resume_tenant(
    admin: Admin,
    name: Name,
) -> None:
    """Resume a suspended tenant: its keys work again."""
    tenant_id = admin.client.find_tenant(name)["id"]
    admin.show_row(admin.client.call("PATCH", path_of("tenants", tenant_id), {"status": "active"}))


@tenant_app.command("erase")
@admin_command
def erase_tenant(
    admin: Admin,
    name: Name,
    yes: Annotated[bool, typer.Option("--yes", help="Confirm the deletion, which cannot be undone.")] = False,
) -> None:
    """Revoke a tenant's keys and erase its content and all names permanently. Its usage figures stay."""
    tenant = admin.client.find_tenant(name)
    if not yes:
        raise typer.BadParameter(f"this erases all data of {tenant['name']} for good; give --yes to do it")
    while (done := admin.client.call("DELETE", path_of("tenants", tenant["id"], "data")))["state"] != "erased":
        time.sleep(PAUSE_S)
    counts = done.pop("counts")
    admin.show_row({**done, "counts": counts} if admin.as_json else {**done, **counts})


@project_app.command("list")
@admin_command
def list_projects(
    admin: Admin,
    tenant: Annotated[str | None, typer.Option(help="Name or id of a tenant. If not given, all tenants.")] = None,
) -> None:
    """List projects, oldest first."""
    tenant_id = admin.client.find_tenant(tenant)["id"] if tenant is not None else None
    admin.show_rows(list(admin.client.pages("/projects", tenant_id=tenant_id)), PROJECT_COLUMNS)


@project_app.command("create")
@admin_command
def create_project(
    admin: Admin,
    name: Annotated[str, typer.Argument(help="Name of the new project.")],
    tenant: Annotated[str, typer.Option(help="Name or id of the tenant that the project belongs to.")],
) -> None:
    """Create a project of a tenant."""
    body = {"name": name, "tenant_id": admin.client.find_tenant(tenant)["id"]}
    admin.show_row(admin.client.call("POST", "/projects", body))
