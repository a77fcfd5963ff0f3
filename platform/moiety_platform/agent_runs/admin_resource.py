"""Declaration of agent runs as an administered resource. Requests begin them; administrators see and stop them."""

from __future__ import annotations

from moiety_platform.access.actions import MANAGED_BY_TENANTS
from moiety_platform.resources.commands import OWNER_TENANT, TENANT_FILTER, Command, CustomCommand, Parameter
from moiety_platform.resources.declaration import Resource

_RUN = Parameter.path_argument("run", "Name or id of the run.", finds="run")

RUNS = Resource(
    name="run",
    help="List, show and stop agent runs: requests that share a budget and a deadline.",
    access=MANAGED_BY_TENANTS,
    page="agent-runs.md",
    columns={
        "name": "name",
        "tenant": "tenant",
        "status": "status",
        "num_requests": "requests",
        "used_tokens": "tokens",
        "budget_tokens": "of tokens",
        "used_usd": "$",
        "budget_usd": "of $",
        "deadline_at": "deadline",
        "id": "id",
    },
    commands=(
        Command.list_objects("List the newest runs.", TENANT_FILTER),
        CustomCommand("show", "moiety_platform.cli.runs:show_run"),
        Command(
            "stop",
            "Stop a run: its open requests end within seconds, and later ones are refused.",
            method="POST",
            suffix="stop",
            parameters=(OWNER_TENANT, _RUN),
        ),
    ),
)
