"""Declaration of webhooks as an administered resource. A webhook's secret is shown once, when it is created."""

from __future__ import annotations

from moiety_platform.access.actions import OPERATORS, AdminAction
from moiety_platform.resources.commands import Command, Output, Place, argument
from moiety_platform.resources.declaration import Resource

WEBHOOKS = Resource(
    name="webhook",
    collection="webhooks",
    about="List, create and delete webhooks, the addresses that receive alerts of quotas.",
    summary="List, create and delete webhooks, which receive alerts.",
    read=AdminAction("webhooks.read", OPERATORS),  # an address may contain a secret of its receiver
    write=AdminAction("webhooks.write", OPERATORS),
    page="quotas.md#alerts",
    apply_kind="moiety_platform.webhooks.declared:WEBHOOK",
    columns={
        "url": "address",
        "pending": "waiting",
        "dead": "given up",
        "delivered_at": "last taken",
        "failed_at": "last failed",
        "last_error": "with",
        "id": "id",
    },
    commands=(
        Command(name="list", help="List webhooks, oldest first, and their delivery status.", output=Output.ROWS),
        Command(
            name="create",
            help="Create a webhook, which receives alerts from now on. Prints the secret that signs them.",
            method="POST",
            parameters=(argument("address", "https:// URL that alerts are posted to.", field="url"),),
            output=Output.SECRET,
            notice="the secret of {webhook[id]}; it is not shown again",
        ),
        Command(
            name="delete",
            help="Delete a webhook: no more alerts go to its address.",
            method="DELETE",
            parameters=(
                argument("webhook_id", "Id of the webhook, as moiety webhook list shows it.", place=Place.PATH),
            ),
        ),
    ),
)
