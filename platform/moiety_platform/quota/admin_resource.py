"""Declaration of limits (quotas and rate limits) as an administered resource."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS, OWN_READERS, OWN_WRITERS, READERS, AdminAction
from moiety_platform.resources.commands import Command, CustomCommand, Place, argument
from moiety_platform.resources.declaration import Resource

WRITE_TENANT_QUOTAS = AdminAction("tenant_quotas.write", OPERATORS)

QUOTAS = Resource(
    name="quota",
    collection="quotas",
    about="List, set and delete quotas and rate limits of tenants, projects and keys.",
    summary="List, set and delete quotas and rate limits of tenants, projects and keys.",
    read=AdminAction("quotas.read", READERS, OWN_READERS),
    write=AdminAction("quotas.write", OPERATORS, OWN_WRITERS),
    more=(WRITE_TENANT_QUOTAS,),
    page="quotas.md",
    apply_kind="moiety_platform.quota.declared:LIMIT",
    columns={
        "level": "of",
        "scope_id": "id",
        "kind": "limit",
        "cap": "cap",
        "used": "used",
        "reserved": "reserved",
        "resets_at": "renewed",
        "alert_at": "alert at %",
        "alerted": "alerted %",
        "id": "limit's id",
    },
    commands=(
        CustomCommand("list", "moiety_platform.cli.quotas:list_quotas"),
        CustomCommand("set", "moiety_platform.cli.quotas:set_quota"),
        Command(
            name="delete",
            help="Delete a limit.",
            method="DELETE",
            parameters=(argument("quota_id", "Id of the limit, as moiety quota list shows it.", place=Place.PATH),),
        ),
    ),
)
