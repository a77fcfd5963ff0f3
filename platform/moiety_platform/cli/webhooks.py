"""Commands `moiety webhook …`. A webhook's secret is shown once, by the command that creates it."""

from __future__ import annotations

from typing import Annotated

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.gateway_client import path_of
from moiety_platform.cli.printing import say
from moiety_platform.cli.tables import show_json

COLUMNS = {
    "url": "address",
    "pending": "waiting",
    "dead": "given up",
    "delivered_at": "last taken",
    "failed_at": "last failed",
    "last_error": "with",
    "id": "id",
}

app = typer.Typer(
    no_args_is_help=True, help="List, create and delete webhooks, the addresses that receive alerts of quotas."
)


@app.command("list")
@admin_command
def list_webhooks(admin: Admin) -> None:
    """List webhooks, oldest first, and their delivery status."""
    admin.show_rows(admin.client.get("/webhooks")["data"], COLUMNS)


@app.command("create")
@admin_command
def create_webhook(
    admin: Admin,
    address: Annotated[str, typer.Argument(help="https:// URL that alerts are posted to.")],
) -> None:
    """Create a webhook, which receives alerts from now on. Prints the secret that signs them."""
    made = admin.client.call("POST", "/webhooks", {"url": address})
    if admin.as_json:
        show_json(made)
        return
    say(made["secret"])
    say(f"the secret of {made['webhook']['id']}; it is not shown again", err=True)


@app.command("delete")
@admin_command
def delete_webhook(
    admin: Admin,
    webhook_id: Annotated[str, typer.Argument(help="Id of the webhook, as moiety webhook list shows it.")],
) -> None:
    """Delete a webhook: no more alerts go to its address."""
    admin.show_row(admin.client.call("DELETE", path_of("webhooks", webhook_id)))
