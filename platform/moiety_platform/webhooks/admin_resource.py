"""Declaration of webhooks as an administered resource. A webhook's secret is shown once, when it is created."""

from __future__ import annotations

from pathlib import Path

from moiety_platform.access.actions import OPERATORS_ONLY
from moiety_platform.resources.commands import Command, Output, Parameter
from moiety_platform.resources.declaration import Resource

_WEBHOOK = Parameter.path_argument("webhook", "Id or address of the webhook.", finds="webhook")


def parse_events(text: str) -> list[str]:
    """Return the groups of events in a text such as `engine,slo`, which the gateway checks."""
    return [name.strip() for name in text.split(",")]


def parse_routing_key(text: str) -> str:
    """Return a routing key, or the contents of the file after an @. Raises ValueError."""
    if not text.startswith("@"):
        return text
    try:
        return Path(text[1:]).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ValueError(f"cannot be read from {text[1:]!r}: {exc}") from exc


WEBHOOKS = Resource(
    name="webhook",
    help="List, create, test and delete webhooks, the addresses that receive alerts.",
    access=OPERATORS_ONLY,  # an address may contain a secret of its receiver
    page="alerts.md",
    columns={
        "url": "address",
        "format": "format",
        "events": "events",
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
        Command.list_objects("List webhooks, oldest first, and their delivery status."),
        Command(
            "create",
            "Create a webhook, which receives alerts from now on. Print the secret that signs them.",
            method="POST",
            parameters=(
                Parameter.argument("address", "https:// URL that alerts are posted to.", field="url"),
                Parameter(name="format", help="Format of the bodies: json (default), slack or pagerduty."),
                Parameter(
                    name="routing_key",
                    parse=parse_routing_key,
                    help="Integration key of an Events API v2 integration, for the format pagerduty; @FILE reads it "
                    "from a file.",
                ),
                Parameter(
                    name="events",
                    parse=parse_events,
                    help="Groups of events that it receives, separated by commas: quota, engine, slo, disk. If not "
                    "given, all.",
                ),
            ),
            output=Output.SECRET,
            notice="the secret of {webhook[id]}; it is not shown again",
        ),
        Command(
            "test",
            "Send a test event to a webhook now, and show the receiver's status and the beginning of its response.",
            method="POST",
            suffix="test",
            parameters=(_WEBHOOK,),
        ),
        Command.delete_object("Delete a webhook: no more alerts go to its address.", _WEBHOOK),
    ),
    apply_kind="moiety_platform.webhooks.declared:WEBHOOK",
)
