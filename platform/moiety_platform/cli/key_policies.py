"""Commands `moiety key-policy show` and `set`. A tenant's name or id identifies its policy."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from moiety_platform.auth.key_policies.admin_resource import plain
from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.errors import Refused
from moiety_platform.cli.keys import KeyLimits, parse_limits
from moiety_platform.cli.object_names import warn_of_unknown_models
from moiety_platform.resources.paths import path_of

PolicyTenant = Annotated[str, typer.Argument(help="Name or id of the tenant.")]


@admin_command
def show_policy(admin: Admin, tenant: PolicyTenant) -> None:
    """Show which keys the developers of a tenant may make."""
    found = admin.client.get(path_of("key-policies", admin.client.find_tenant(tenant)["id"]))
    admin.show_row(found if admin.as_json else plain(found))


@admin_command
def set_policy(
    admin: Admin,
    tenant: PolicyTenant,
    makes_keys: Annotated[
        bool | None, typer.Option("--makes-keys/--no-keys", help="Let developers make keys. A new policy: yes.")
    ] = None,
    max_keys: Annotated[
        int | None, typer.Option(min=0, help="Most keys of a developer that work at a time. A new policy: 5.")
    ] = None,
    max_days: Annotated[
        int | None, typer.Option(min=0, help="Longest lifetime of a key, in days; 0 for no bound.")
    ] = None,
    model: Annotated[
        list[str] | None,
        typer.Option(help="Name of a model that keys may use. May be given several times, and replaces those before."),
    ] = None,
    all_models: Annotated[bool, typer.Option("--all-models", help="Let keys use all models.")] = False,
    limit: KeyLimits = None,
    no_limits: Annotated[bool, typer.Option("--no-limits", help="Remove the quotas from the policy.")] = False,
) -> None:
    """Set which keys the developers of a tenant may make. What is not given stays as it is.

    Each key gets the quotas of --limit, unless its maker asks for lower ones.
    """
    tenant_id = admin.client.find_tenant(tenant)["id"]
    path = path_of("key-policies", tenant_id)
    try:
        body: dict[str, Any] = admin.client.get(path)
    except Refused as exc:
        if exc.param != "tenant_id":
            raise
        body = {"tenant_id": tenant_id}
    if makes_keys is not None:
        body["makes_keys"] = makes_keys
    if max_keys is not None:
        body["max_keys"] = max_keys
    if max_days is not None:
        body["max_days"] = max_days or None
    if model and all_models:
        raise typer.BadParameter("give --model or --all-models, not both")
    if model or all_models:
        body["allowed_models"] = model or None
    if limit and no_limits:
        raise typer.BadParameter("give --limit or --no-limits, not both")
    if limit or no_limits:
        body["limits"] = {**body.get("limits", {}), **parse_limits(limit)} if limit else {}
    warn_of_unknown_models(admin.client, model or ())
    changed = admin.client.call("PUT", "/key-policies", body)
    admin.show_row(changed if admin.as_json else plain(changed))
