"""Declaration of webhooks as an administered resource. A webhook's secret is shown once, when it is created."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS_ONLY
from moiety_platform.resources.commands import Command, Output, argument, path_argument
from moiety_platform.resources.declaration import Resource

WEBHOOKS = Resource(
    name="webhook",
    help="List, create and delete webhooks, the addresses that receive alerts of quotas.",
    access=OPERATORS_ONLY,  # an address may contain a secret of its receiver
    page="quotas.md#alerts",
    columns={
        "url": "address",
        "pending": "waiting",
        "dead": "given up",
        "delivered_at": "last taken",
        "failed_at": "last failed",
        "last_error": "with",
        "id": "id",
    },
    details=("delivered_at", "failed_at", "last_error"),
    prose=("last_error",),
    commands=(
        Command("list", "List webhooks, oldest first, and their delivery status.", output=Output.ROWS),
        Command(
            "create",
            "Create a webhook, which receives alerts from now on. Print the secret that signs them.",
            method="POST",
            parameters=(argument("address", "https:// URL that alerts are posted to.", field="url"),),
            output=Output.SECRET,
            notice="the secret of {webhook[id]}; it is not shown again",
        ),
        Command(
            "delete",
            "Delete a webhook: no more alerts go to its address.",
            method="DELETE",
            parameters=(path_argument("webhook", "Id or address of the webhook.", finds="webhook"),),
        ),
    ),
    apply_kind="moiety_platform.webhooks.declared:WEBHOOK",
)
