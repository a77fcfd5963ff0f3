"""Declarations of tenants and of their projects as administered resources."""

from __future__ import annotations

from moiety_platform.access.actions import MANAGED_BY_OPERATORS, MANAGED_BY_TENANTS, OWNER, AdminAction
from moiety_platform.resources.commands import TENANT_FILTER, Command, CustomCommand, Output, Parameter
from moiety_platform.resources.declaration import Resource

ERASE_TENANTS = AdminAction("tenants.erase", OWNER)

_TENANT = Parameter.path_argument("name", "Name or id of the tenant.", finds="tenant")
_TERMS = (
    Parameter(
        name="service_class",
        flag="--class",
        help="Best service class that the tenant may use, as moiety class list shows it.",
    ),
    Parameter(
        name="weight",
        type=float,
        help="Weight of the tenant in fair sharing with the other tenants of its class. The usual weight is 1.",
    ),
    Parameter(
        name="speculative_prefill",
        help="Speculative prefill of the likely next turns of conversations by idle engines: off, free, or charged (at "
        "the price of prompt tokens).",
    ),
)


def _status_command(name: str, status: str, help_text: str) -> Command:
    return Command(name, help_text, method="PATCH", parameters=(_TENANT,), constants={"status": status})


TENANTS = Resource(
    name="tenant",
    help="List, show, create, change, suspend and erase tenants: their service classes and weights.",
    access=MANAGED_BY_OPERATORS,
    page="administration.md",
    columns={
        "name": "name",
        "service_class": "class",
        "weight": "weight",
        "status": "status",
        "speculative_prefill": "speculative prefill",
        "created_at": "created",
        "id": "id",
    },
    details=("speculative_prefill", "created_at", "weight"),
    commands=(
        Command.list_objects("List all tenants, oldest first.", output=Output.PAGES),
        Command.show_object("Show one tenant.", _TENANT),
        Command(
            "create",
            "Create a tenant.",
            method="POST",
            parameters=(Parameter.argument("name", "Name of the new tenant."), *_TERMS),
        ),
        Command(
            "change",
            "Change a tenant's name, class, weight or speculative prefill.",
            method="PATCH",
            parameters=(
                _TENANT,
                Parameter(name="new_name", field="name", flag="--name", help="New name of the tenant."),
                *_TERMS,
            ),
            lacks="nothing to change; give --name, --class, --weight or --speculative-prefill",
        ),
        _status_command("suspend", "suspended", "Suspend a tenant: its keys are rejected until it is resumed."),
        _status_command("resume", "active", "Resume a suspended tenant: its keys work again."),
        CustomCommand("erase", "moiety_platform.cli.tenants:erase_tenant"),
    ),
    more=(ERASE_TENANTS,),
    apply_kind="moiety_platform.tenants.declared:TENANT",
)

_TENANT_OF_PROJECT = Parameter(
    name="tenant",
    field="tenant_id",
    help="Name or id of the tenant that the project belongs to.",
    finds="tenant",
    is_required=True,
)

PROJECTS = Resource(
    name="project",
    help="List and create the projects of a tenant, which its keys belong to.",
    access=MANAGED_BY_TENANTS,
    page="administration.md",
    columns={"name": "name", "tenant": "tenant", "created_at": "created", "id": "id", "tenant_id": "tenant's id"},
    details=("tenant_id", "created_at"),
    commands=(
        Command.list_objects("List projects, oldest first.", TENANT_FILTER, output=Output.PAGES),
        Command(
            "create",
            "Create a project of a tenant.",
            method="POST",
            parameters=(Parameter.argument("name", "Name of the new project."), _TENANT_OF_PROJECT),
        ),
    ),
    apply_kind="moiety_platform.tenants.declared:PROJECT",
)
