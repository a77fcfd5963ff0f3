"""Commands `moiety user …` that send several requests, or find a user in one tenant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import typer

from moiety_platform.access.roles import Role, tenant_complaint
from moiety_platform.cli.admin_client import AdminClient
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import find_user
from moiety_platform.cli.option_groups import OptionGroup
from moiety_platform.cli.printing import print_line
from moiety_platform.cli.tables import show_json, show_time
from moiety_platform.resources.paths import path_of

UserArgument = Annotated[str, typer.Argument(help="Email address or id of the user.")]
UserTenant = Annotated[
    str | None, typer.Option("--tenant", help="Name or id of the tenant of the role. If not given, any.")
]
Everywhere = Annotated[
    bool, typer.Option("--everywhere", help="Include the roles of the same email address in all tenants.")
]
UserProjects = Annotated[
    list[str] | None,
    typer.Option(
        "--project",
        help="Name or id of a project that the developer reaches. May be given several times. If not given, all.",
    ),
]


@dataclass(frozen=True)
class UserScope(OptionGroup):
    """Options of the roles of a person that a command changes."""

    tenant: UserTenant = None
    everywhere: Everywhere = False


@admin_command
def invite_user(
    admin: Admin,
    email: Annotated[str, typer.Argument(help="Email address of the user.")],
    role: Annotated[
        Role | None,
        typer.Option(help="Role of a new user. tenant-admin and developer require --tenant, viewer accepts it."),
    ] = None,
    tenant: UserTenant = None,
    name: Annotated[str, typer.Option(help="Name of a new user, for display.")] = "",
    project: UserProjects = None,
    valid_hours: Annotated[
        int | None, typer.Option(min=1, help="Hours for which the invitation is valid. If not given, 72.")
    ] = None,
    dashboard: Annotated[
        str | None,
        typer.Option(
            envvar="MOIETY_DASHBOARD_URL",
            help="URL of the dashboard, to print the invitation as a link. If not given, the code alone.",
        ),
    ] = None,
) -> None:
    """Create a user if it does not exist, and make an invitation, which replaces an open one.

    Standard output has the link or the code alone. It is shown once, and is good for one sign-in.
    """
    tenant_id = None if tenant is None else admin.client.find_tenant(tenant)["id"]
    user = _find_or_create(admin.client, email, role, tenant_id, name, project)
    body = None if valid_hours is None else {"valid_hours": valid_hours}
    made = admin.client.call("POST", path_of("users", user["id"], "invitation"), body)
    if admin.as_json:
        show_json(made)
        return
    print_line(made["secret"] if dashboard is None else f"{dashboard.rstrip('/')}{made['path']}")
    print_line(f"id {user['id']}, valid until {show_time(made['user']['invitation_expires_at'])}", err=True)


@admin_command
def change_user(
    admin: Admin,
    user: UserArgument,
    tenant: UserTenant = None,
    role: Annotated[Role | None, typer.Option(help="New role.")] = None,
    name: Annotated[str | None, typer.Option(help="New name, for display.")] = None,
    project: UserProjects = None,
    all_projects: Annotated[
        bool, typer.Option("--all-projects", help="Let a developer reach all projects of the tenant.")
    ] = False,
) -> None:
    """Change a user's role, name or projects. Its keys beyond the new rights are revoked for good."""
    found = _find(admin.client, user, tenant)
    body: dict[str, Any] = {}
    if role is not None:
        body["role"] = role
    if name is not None:
        body["name"] = name
    if project:
        body["project_ids"] = _project_ids(admin.client, found["tenant_id"], project)
    if all_projects:
        if project:
            raise typer.BadParameter("give --project or --all-projects, not both")
        body["project_ids"] = None
    if not body:
        raise typer.BadParameter("nothing to change; give --role, --name, --project or --all-projects")
    admin.show_row(admin.client.call("PATCH", path_of("users", found["id"]), body))


@admin_command
def disable_user(admin: Admin, user: UserArgument, scope: UserScope) -> None:
    """Disable a user: its sign-ins, open sessions and keys are refused from then on."""
    _set_state(admin, user, scope, "disabled")


@admin_command
def enable_user(admin: Admin, user: UserArgument, scope: UserScope) -> None:
    """Enable a disabled user: its sign-ins and keys work again."""
    _set_state(admin, user, scope, "active")


def _set_state(admin: Admin, text: str, scope: UserScope, state: str) -> None:
    if scope.everywhere and scope.tenant is None and "@" in text:
        named = list(admin.client.pages("/users", email=text))
        text = named[0]["id"] if named else text
    found = _find(admin.client, text, scope.tenant)
    body = {"state": state, "everywhere": scope.everywhere}
    admin.show_row(admin.client.call("PATCH", path_of("users", found["id"]), body))


def _find(client: AdminClient, text: str, tenant: str | None) -> dict[str, Any]:
    return find_user(client, text, tenant_id=None if tenant is None else client.find_tenant(tenant)["id"])


def _find_or_create(
    client: AdminClient, email: str, role: Role | None, tenant_id: str | None, name: str, projects: list[str] | None
) -> dict[str, Any]:
    """Return the user of this address in the tenant, or in the deployment for None; create it if it is missing."""
    named = [one for one in client.pages("/users", email=email) if one["tenant_id"] == tenant_id]
    if named:
        if role is not None and named[0]["role"] != role:
            raise typer.BadParameter(
                f"{email} has the role {named[0]['role']} already; change it with: moiety user change {email}"
            )
        return named[0]
    if role is None:
        raise typer.BadParameter("the user does not exist yet; give --role")
    if complaint := tenant_complaint(role, tenant_id):
        raise typer.BadParameter(complaint)
    body: dict[str, Any] = {"email": email, "role": role, "tenant_id": tenant_id, "name": name}
    if projects:
        body["project_ids"] = _project_ids(client, tenant_id, projects)
    created: dict[str, Any] = client.call("POST", "/users", body)
    return created


def _project_ids(client: AdminClient, tenant_id: str | None, projects: list[str]) -> list[str]:
    if tenant_id is None:
        raise typer.BadParameter("--project is for developers of one tenant; give --tenant")
    return [client.find_project(tenant_id, one)["id"] for one in projects]
