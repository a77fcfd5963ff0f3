"""Declaration of keys as an administered resource. A key's text is shown once, when it is created."""

from __future__ import annotations

from moiety_platform.access.actions import MANAGED_BY_TENANTS, OWNER, AdminAction
from moiety_platform.resources.commands import Command, CustomCommand, Output, Parameter, path_argument
from moiety_platform.resources.declaration import Resource

WRITE_ADMIN_KEYS = AdminAction("admin_keys.write", OWNER)
KEEP_KEY_NOTICE = "Store it now: it is not shown again."

_KEY = path_argument("key_id", "Id of the key: the part between mty_ and the dot.")

KEYS = Resource(
    name="key",
    help="List, create, rotate and revoke API keys of clients and keys of administrators.",
    access=MANAGED_BY_TENANTS,
    page="administration.md",
    columns={
        "id": "id",
        "name": "name",
        "hint": "ends in",
        "role": "role",
        "belongs_to": "of",
        "status": "status",
        "allowed_models": "models",
        "created_at": "created",
        "expires_at": "expires",
    },
    commands=(
        CustomCommand("list", "moiety_platform.cli.keys:list_keys"),
        CustomCommand("create", "moiety_platform.cli.keys:create_key"),
        Command(
            "rotate",
            "Create a key's successor, with the same rights.",
            method="POST",
            suffix="rotate",
            parameters=(
                _KEY,
                Parameter(
                    name="grace_s",
                    type=int,
                    minimum=0,
                    help="Time for which the old key remains valid, in seconds. If not given, one day.",
                ),
            ),
            output=Output.SECRET,
            notice=KEEP_KEY_NOTICE,
        ),
        Command(
            "revoke",
            "Revoke a key permanently.",
            method="POST",
            suffix="revoke",
            parameters=(_KEY,),
        ),
    ),
    more=(WRITE_ADMIN_KEYS,),
    apply_kind="moiety_platform.auth.declared:KEY",
)
