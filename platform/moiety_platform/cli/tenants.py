"""Command `moiety tenant erase`, which repeats its request until the tenant's data is deleted."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.resources.paths import path_of

PAUSE_S = 1.0  # between polls of a tenant data deletion

Name = Annotated[str, typer.Argument(help="Name or id of the tenant.")]


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
