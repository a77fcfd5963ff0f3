"""Declaration of LoRA adapters as an administered resource. Files do not declare them: they hold no weights."""

from __future__ import annotations

from moiety_platform.access.actions import MANAGED_BY_TENANTS, OPERATORS, AdminAction
from moiety_platform.resources.commands import OWNER_TENANT, TENANT_FILTER, Command, CustomCommand, Parameter
from moiety_platform.resources.declaration import Resource

GRANT_ADAPTERS = AdminAction("adapters.grant", OPERATORS)  # adapters on the engines' hosts

ADAPTERS = Resource(
    name="adapter",
    help="List, upload and remove LoRA adapters of tenants, in PEFT format.",
    access=MANAGED_BY_TENANTS,
    page="adapters.md",
    columns={
        "served_as": "model",
        "tenant": "tenant",
        "state": "state",
        "num_bytes": "bytes",
        "engine_adapter": "on engines",
        "id": "id",
        "tenant_id": "tenant's id",
    },
    details=("tenant_id", "num_bytes", "engine_adapter"),
    commands=(
        Command.list_objects("List adapters, by tenant, model and name.", TENANT_FILTER),
        CustomCommand("add", "moiety_platform.cli.adapters:add_adapter"),
        Command(
            "remove",
            "Remove an adapter, so that no request can use it any more.",
            method="DELETE",
            parameters=(
                OWNER_TENANT,
                Parameter.path_argument("adapter", "Id of the adapter, or MODEL:NAME.", finds="adapter"),
            ),
        ),
    ),
    more=(GRANT_ADAPTERS,),
)
