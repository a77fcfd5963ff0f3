"""Declaration of keys as an administered resource. A key's text is shown once, when it is created."""

from __future__ import annotations

from moiety_platform.access.actions import MANAGED_BY_TENANTS, OWNER, AdminAction
from moiety_platform.resources.commands import CustomCommand
from moiety_platform.resources.declaration import Resource

WRITE_ADMIN_KEYS = AdminAction("admin_keys.write", OWNER)
KEEP_KEY_NOTICE = "Store it now: it is not shown again."

KEYS = Resource(
    name="key",
    help="List, create, rotate and revoke API keys of clients and keys of administrators.",
    access=MANAGED_BY_TENANTS,
    page="administration.md",
    columns={
        "id": "id",
        "name": "name",
        "owner": "of",
        "role": "role",
        "status": "status",
        "expires_at": "expires",
        "last_used_at": "last used",
        "spend": "spend",
        "limits": "quotas",
        "hint": "ends in",
        "allowed_models": "models",
        "created_at": "created",
        "belongs_to": "of id",
    },
    details=(
        "belongs_to",
        "created_at",
        "limits",
        "allowed_models",
        "hint",
        "last_used_at",
        "expires_at",
        "role",
        "spend",
    ),
    commands=(
        CustomCommand("list", "moiety_platform.cli.keys:list_keys"),
        CustomCommand("create", "moiety_platform.cli.keys:create_key"),
        CustomCommand("rotate", "moiety_platform.cli.keys:rotate_key"),
        CustomCommand("revoke", "moiety_platform.cli.keys:revoke_key"),
    ),
    more=(WRITE_ADMIN_KEYS,),
    apply_kind="moiety_platform.auth.declared:KEY",
)
