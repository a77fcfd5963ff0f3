"""Declaration of keys as an administered resource. A key's text is shown once, when it is created."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS, OWN_READERS, OWN_WRITERS, OWNER, READERS, AdminAction
from moiety_platform.resources.commands import Command, CustomCommand, Output, Parameter, Place, argument
from moiety_platform.resources.declaration import Resource

WRITE_ADMIN_KEYS = AdminAction("admin_keys.write", OWNER)
KEEP_IT = "Keep it now: it is not shown again."

_KEY = argument("key_id", "Id of the key: the part between mty_ and the dot.", place=Place.PATH)

KEYS = Resource(
    name="key",
    collection="keys",
    about="Manage API keys of clients and keys of administrators.",
    summary="List, create, rotate and revoke keys.",
    read=AdminAction("keys.read", READERS, OWN_READERS),
    write=AdminAction("keys.write", OPERATORS, OWN_WRITERS),
    more=(WRITE_ADMIN_KEYS,),
    page="administration.md",
    apply_kind="moiety_platform.auth.declared:KEY",
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
            name="rotate",
            help="Create a key's successor, with the same rights.",
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
            notice=KEEP_IT,
        ),
        Command(
            name="revoke",
            help="Revoke a key permanently.",
            method="POST",
            suffix="revoke",
            parameters=(_KEY,),
        ),
    ),
)
