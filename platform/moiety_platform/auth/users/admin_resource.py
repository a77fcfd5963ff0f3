"""Declaration of users as an administered resource."""

from __future__ import annotations

from typing import Any

from moiety_platform.access.actions import MANAGED_BY_TENANTS, OWNER, AdminAction
from moiety_platform.resources.commands import TENANT_FILTER, Command, CustomCommand, Output, Parameter
from moiety_platform.resources.declaration import Resource

WRITE_ADMIN_USERS = AdminAction("admin_users.write", OWNER)

_USER = Parameter.path_argument("user", "Email address or id of the user.", finds="user")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its list as text, and with the end of a role as the state."""
    state = "role ended" if row["state"] == "active" and row["role_ended_at"] else row["state"]
    return {**row, "state": state, "project_ids": ", ".join(row["project_ids"]) if row["project_ids"] else None}


USERS = Resource(
    name="user",
    help="List, invite, change, disable and delete users, who sign in through the identity provider.",
    access=MANAGED_BY_TENANTS,
    page="users.md",
    columns={
        "email": "email",
        "name": "name",
        "role": "role",
        "tenant": "tenant",
        "state": "state",
        "accepted_at": "accepted",
        "invitation_expires_at": "invitation until",
        "project_ids": "projects",
        "created_at": "created",
        "id": "id",
    },
    details=("created_at", "project_ids", "invitation_expires_at", "accepted_at", "name"),
    plain=plain,
    commands=(
        Command.list_objects("List users, oldest first.", TENANT_FILTER, output=Output.PAGES),
        Command.show_object("Show one user.", _USER),
        CustomCommand("invite", "moiety_platform.cli.users:invite_user"),
        CustomCommand("change", "moiety_platform.cli.users:change_user"),
        CustomCommand("disable", "moiety_platform.cli.users:disable_user"),
        CustomCommand("enable", "moiety_platform.cli.users:enable_user"),
        Command.delete_object("Delete a user, and revoke its keys.", _USER),
    ),
    more=(WRITE_ADMIN_USERS,),
    apply_kind="moiety_platform.auth.users.declared:USER",
)
