"""Declaration of limits (quotas and rate limits) as an administered resource."""

from __future__ import annotations

from typing import Any

from moiety_platform.access.actions import MANAGED_BY_TENANTS, OPERATORS, AdminAction
from moiety_platform.prices.token_cost import dollars
from moiety_platform.resources.commands import Command, CustomCommand, Parameter
from moiety_platform.resources.declaration import Resource

WRITE_TENANT_QUOTAS = AdminAction("tenant_quotas.write", OPERATORS)


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a limit for people: money in dollars instead of nano-dollars."""
    if not row["kind"].startswith("money"):
        return row
    return {**row, **{name: f"$ {dollars(row[name])}" for name in ("cap", "used", "reserved")}}


QUOTAS = Resource(
    name="quota",
    help="List, set and delete quotas and rate limits of tenants, projects and keys.",
    access=MANAGED_BY_TENANTS,
    page="quotas.md",
    columns={
        "level": "of",
        "name": "name",
        "kind": "limit",
        "cap": "cap",
        "used": "used",
        "reserved": "reserved",
        "resets_at": "renewed",
        "alert_at": "alert at %",
        "alerted": "alerted %",
        "id": "limit's id",
        "scope_id": "of id",
    },
    details=("scope_id", "alerted", "alert_at", "resets_at", "reserved", "level"),
    commands=(
        CustomCommand("list", "moiety_platform.cli.quotas:list_quotas"),
        CustomCommand("set", "moiety_platform.cli.quotas:set_quota"),
        Command.delete_object(
            "Delete a limit.", Parameter.path_argument("quota_id", "Id of the limit, as moiety quota list shows it.")
        ),
    ),
    more=(WRITE_TENANT_QUOTAS,),
    plain=plain,
    apply_kind="moiety_platform.quota.declared:LIMIT",
)
