"""Command `moiety run show`: an agent run, and its requests as one trace."""

from __future__ import annotations

from typing import Annotated

import typer

from moiety_platform.cli.admin_command import Admin, admin_command
from moiety_platform.cli.object_names import find_run
from moiety_platform.resources.paths import path_of

COLUMNS = {
    "start_ms": "at ms",
    "duration_ms": "ms",
    "endpoint": "endpoint",
    "model": "model",
    "outcome": "outcome",
    "prompt_tokens": "prompt",
    "output_tokens": "output",
    "cost_usd": "$",
    "request_id": "request",
}


@admin_command
def show_run(admin: Admin, run: Annotated[str, typer.Argument(help="Name or id of the run.")]) -> None:
    """Show a run, and its first 1000 requests in their order."""
    found = admin.client.get(path_of("runs", find_run(admin.client, run)["id"]) + "/trace")
    if admin.as_json:
        admin.show_row(found)
        return
    admin.show_row(found["run"])
    admin.show_rows(found["requests"], COLUMNS)
