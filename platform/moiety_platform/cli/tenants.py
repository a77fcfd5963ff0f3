"""`moiety tenant …` and `moiety project …`."""

from __future__ import annotations

from typing import Annotated

import typer

from moiety_platform.cli.admin_client import DEFAULT_DATA_DIR, AdminClient, AdminKey, AsJson, DataDirOption, Url
from moiety_platform.cli.tables import show_row, show_rows

TENANT_COLUMNS = {
    "name": "name",
    "service_class": "class",
    "weight": "weight",
    "status": "status",
    "created_at": "created",
    "id": "id",
}
PROJECT_COLUMNS = {"name": "name", "tenant_id": "tenant", "created_at": "created", "id": "id"}

tenant_app = typer.Typer(no_args_is_help=True, help="Tenants: who is served, in which class, with what weight.")
project_app = typer.Typer(no_args_is_help=True, help="Projects: what a tenant's keys belong to.")

Name = Annotated[str, typer.Argument(help="Name or id of the tenant.")]
ServiceClass = Annotated[
    str | None, typer.Option("--class", help="Best class it may use; list them with: moiety class list.")
]
Weight = Annotated[float | None, typer.Option(help="Its share against the other tenants of its class; 1 is usual.")]


@tenant_app.command("list")
def list_tenants(
    url: Url = None, admin_key: AdminKey = None, data_dir: DataDirOption = DEFAULT_DATA_DIR, as_json: AsJson = False
) -> None:
    """All tenants, oldest first."""
    client = AdminClient.connect(url, admin_key, data_dir)
    show_rows(list(client.pages("/tenants")), TENANT_COLUMNS, as_json)


@tenant_app.command("show")
def show_tenant(
    name: Name,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """One tenant."""
    show_row(AdminClient.connect(url, admin_key, data_dir).find_tenant(name), as_json)


@tenant_app.command("create")
def create_tenant(
    name: Annotated[str, typer.Argument(help="Name of the new tenant.")],
    service_class: ServiceClass = None,
    weight: Weight = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a tenant."""
    client = AdminClient.connect(url, admin_key, data_dir)
    chosen = {"service_class": service_class, "weight": weight}
    body = {"name": name, **{field: value for field, value in chosen.items() if value is not None}}
    show_row(client.call("POST", "/tenants", body), as_json)


@tenant_app.command("change")
def change_tenant(
    name: Name,
    new_name: Annotated[str | None, typer.Option("--name", help="New name.")] = None,
    service_class: ServiceClass = None,
    weight: Weight = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Change a tenant's name, class or weight."""
    chosen = {"name": new_name, "service_class": service_class, "weight": weight}
    change = {field: value for field, value in chosen.items() if value is not None}
    if not change:
        raise typer.BadParameter("nothing to change; give --name, --class or --weight")
    client = AdminClient.connect(url, admin_key, data_dir)
    show_row(client.call("PATCH", f"/tenants/{client.find_tenant(name)['id']}", change), as_json)


@tenant_app.command("suspend")
def suspend_tenant(
    name: Name,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Refuse a tenant's keys, until it is resumed."""
    client = AdminClient.connect(url, admin_key, data_dir)
    tenant_id = client.find_tenant(name)["id"]
    show_row(client.call("PATCH", f"/tenants/{tenant_id}", {"status": "suspended"}), as_json)


@tenant_app.command("resume")
def resume_tenant(
    name: Name,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Let a suspended tenant's keys work again."""
    client = AdminClient.connect(url, admin_key, data_dir)
    tenant_id = client.find_tenant(name)["id"]
    show_row(client.call("PATCH", f"/tenants/{tenant_id}", {"status": "active"}), as_json)


@project_app.command("list")
def list_projects(
    tenant: Annotated[str | None, typer.Option(help="Only those of this tenant (name or id).")] = None,
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Projects, oldest first."""
    client = AdminClient.connect(url, admin_key, data_dir)
    tenant_id = client.find_tenant(tenant)["id"] if tenant is not None else None
    show_rows(list(client.pages("/projects", tenant_id=tenant_id)), PROJECT_COLUMNS, as_json)


@project_app.command("create")
def create_project(
    name: Annotated[str, typer.Argument(help="Name of the new project.")],
    tenant: Annotated[str, typer.Option(help="Whose it is (name or id).")],
    url: Url = None,
    admin_key: AdminKey = None,
    data_dir: DataDirOption = DEFAULT_DATA_DIR,
    as_json: AsJson = False,
) -> None:
    """Make a project of a tenant."""
    client = AdminClient.connect(url, admin_key, data_dir)
    body = {"name": name, "tenant_id": client.find_tenant(tenant)["id"]}
    show_row(client.call("POST", "/projects", body), as_json)
