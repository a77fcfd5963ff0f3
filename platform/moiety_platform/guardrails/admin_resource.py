"""Declaration of guardrails as an administered resource. A guardrail has no id: its name identifies it."""

from __future__ import annotations

from typing import Any

from moiety_platform.access.actions import OPERATORS_ONLY
from moiety_platform.resources.commands import Command, Parameter
from moiety_platform.resources.declaration import Resource

_NAME = Parameter.argument("name", "Name of the guardrail.")
_IN_PATH = _NAME.in_path()


def parse_detectors(text: str) -> list[str]:
    """Return the names in a text, which commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its list as the command takes it."""
    return {**row, "detectors": ", ".join(row["detectors"]) or None}


GUARDRAILS = Resource(
    name="guardrail",
    help="List, show, set and delete guardrails, which check the text of requests and answers.",
    access=OPERATORS_ONLY,  # the address of an endpoint may contain a secret of its receiver
    page="guardrails.md",
    columns={
        "name": "name",
        "stage": "checks",
        "action": "action",
        "on_failure": "fails",
        "detectors": "detectors",
        "url": "endpoint",
        "entry_point": "entry point",
        "tenant": "tenant",
    },
    plain=plain,
    commands=(
        Command.list_objects("List all guardrails by name."),
        Command.show_object("Show one guardrail.", _IN_PATH),
        Command.set_object(
            "Set or replace a guardrail. It applies to requests that begin later, at every gateway within seconds.",
            _NAME,
            Parameter(name="stage", help="Text that is checked: input or output.", is_required=True),
            Parameter(name="action", help="What a finding causes: block or observe."),
            Parameter(
                name="on_failure",
                help="What a check that fails or is late causes: open (the text passes) or closed (503).",
            ),
            Parameter(
                name="detectors",
                parse=parse_detectors,
                help="Built-in detectors, separated by commas: secrets, card_numbers.",
            ),
            Parameter(name="endpoint", field="url", help="https:// URL of an endpoint that checks the text."),
            Parameter(
                name="entry_point",
                help="Entry point in moiety.guardrails of a Python package that is installed at the gateways.",
            ),
            Parameter(
                name="timeout_ms", type=int, help="Time in milliseconds of a check by an endpoint or entry point."
            ),
            Parameter(name="memory_mb", type=int, help="Memory of the process of a check by an entry point, in MiB."),
            Parameter(
                name="tenant",
                field="tenant_id",
                finds="tenant",
                help="Name or id of the only tenant that it is for. If not given, all.",
            ),
        ),
        Command.delete_object("Delete a guardrail.", _IN_PATH),
    ),
    apply_kind="moiety_platform.guardrails.declared:GUARDRAIL",
)
