"""Declaration of key policies as an administered resource. Its tenant identifies a policy."""

from __future__ import annotations

from typing import Any

from moiety_platform.access.actions import MANAGED_BY_TENANTS
from moiety_platform.resources.commands import TENANT_FILTER, Command, CustomCommand, Output, Parameter
from moiety_platform.resources.declaration import Resource

_TENANT = Parameter.path_argument("tenant", "Name or id of the tenant.", finds="tenant")


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its lists as text."""
    limits = ", ".join(f"{kind} {cap}" for kind, cap in row["limits"].items())
    return {**row, "allowed_models": ", ".join(row["allowed_models"] or ()) or None, "limits": limits or None}


KEY_POLICIES = Resource(
    name="key-policy",
    plural="key-policies",
    help="List, show, set and delete the policies of tenants for keys that their developers make.",
    access=MANAGED_BY_TENANTS,
    page="users.md",
    columns={
        "tenant": "tenant",
        "makes_keys": "developers make keys",
        "max_keys": "most keys",
        "max_days": "longest lifetime in days",
        "allowed_models": "models",
        "limits": "highest quotas",
        "tenant_id": "tenant's id",
    },
    details=("tenant_id", "limits", "allowed_models"),
    plain=plain,
    commands=(
        Command.list_objects("List all policies.", TENANT_FILTER, output=Output.PAGES),
        CustomCommand("show", "moiety_platform.cli.key_policies:show_policy"),
        CustomCommand("set", "moiety_platform.cli.key_policies:set_policy"),
        Command.delete_object("Delete a tenant's policy: its developers make no keys any more.", _TENANT),
    ),
    apply_kind="moiety_platform.auth.key_policies.declared:KEY_POLICY",
)
