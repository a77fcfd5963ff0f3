"""Declaration of service classes as an administered resource."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from moiety_platform.access.actions import MANAGED_BY_OPERATORS
from moiety_platform.resources.commands import Command, Parameter
from moiety_platform.resources.declaration import Resource

NOTHING = "none"
ROUNDED = 6  # significant digits; a table shows 0.033 s unchanged


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row whose numbers keep their small digits in a table."""
    return {
        field: f"{value:.{ROUNDED}g}" if isinstance(value, float) and value < 1000 else value
        for field, value in row.items()
    }


def _seconds(text: str) -> float | None:
    """Return seconds, or None for `none`. Raises ValueError."""
    if text.lower() == NOTHING:
        return None
    try:
        return float(text)
    except ValueError as exc:
        raise ValueError(f"must be seconds, such as 0.5, or none, not {text!r}") from exc


def _percent(text: str) -> int | None:
    """Return a whole percentage, or None for `none`. Raises ValueError."""
    if text.lower() == NOTHING:
        return None
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"must be a whole percentage, such as 20, or none, not {text!r}")
    return int(text)


def _text(text: str) -> str | None:
    """Return a text, or None for `none`."""
    return None if text == NOTHING else text


_NAME = Parameter.argument("name", "Name of the service class.")
_IN_PATH = _NAME.in_path()
_RANK = Parameter(
    name="rank",
    type=int,
    help="Priority rank. Classes of a lower rank are served first; classes of the same rank share a queue.",
)
_TERMS = (
    Parameter(
        name="weight", type=float, help="Factor that multiplies the weights of the class's tenants within the rank."
    ),
    Parameter(name="ttft_s", parse=_seconds, help="SLO for the time to first token, in seconds, or none."),
    Parameter(
        name="ttft_per_1k_s",
        type=float,
        help="Addition to the TTFT SLO per 1,000 prompt tokens that are not cached, in seconds.",
    ),
    Parameter(name="tpot_s", parse=_seconds, help="SLO for the time per output token, in seconds, or none."),
    Parameter(name="completion_s", parse=_seconds, help="SLO for the time to the last token, in seconds, or none."),
    Parameter(
        name="max_queue_s",
        type=float,
        help="Queueing time after which a request precedes those of other classes, in seconds.",
    ),
    Parameter(
        name="preemptible",
        flag="--preemptible/--not-preemptible",
        type=bool,
        help="Allow the preemption of running requests for more urgent ones.",
    ),
    Parameter(
        name="on_overload", parse=_text, help="Action if the SLO is predicted to be missed: reject, queue or downgrade."
    ),
    Parameter(
        name="downgrade_to", parse=_text, help="Class of a higher rank number that requests are downgraded to, or none."
    ),
    Parameter(name="price_factor", type=float, help="Factor that multiplies prices, such as 0.5 for half the price."),
    Parameter(
        name="credit_percent",
        type=int,
        help="Part of a request's cost, in percent, that is refunded if its quote's guarantee is missed.",
    ),
    Parameter(
        name="spot_floor_percent",
        parse=_percent,
        help="Lowest price of a spot class, in percent of the class's price, or none for a class with a fixed price.",
    ),
    Parameter(
        name="spot_ceiling_percent",
        parse=_percent,
        help="Highest price of a spot class, in percent of the class's price, or none for a class with a fixed price.",
    ),
)

CLASSES = Resource(
    name="class",
    plural="classes",
    help="List, show, change, create and delete service classes: their SLOs and their behaviour at overload.",
    access=MANAGED_BY_OPERATORS,
    page="scheduling.md",
    columns={
        "name": "name",
        "rank": "rank",
        "weight": "weight",
        "ttft_s": "TTFT s",
        "ttft_per_1k_s": "+ s per 1k",
        "tpot_s": "TPOT s",
        "completion_s": "done in s",
        "max_queue_s": "longest wait s",
        "preemptible": "preemptible",
        "on_overload": "at overload",
        "downgrade_to": "falls back to",
        "price_factor": "price ×",
        "credit_percent": "credit %",
        "spot_floor_percent": "spot from %",
        "spot_ceiling_percent": "spot to %",
    },
    details=(
        "spot_floor_percent",
        "spot_ceiling_percent",
        "weight",
        "preemptible",
        "downgrade_to",
        "completion_s",
        "ttft_per_1k_s",
        "max_queue_s",
    ),
    plain=plain,
    commands=(
        Command.list_objects("List all classes, best first."),
        Command.show_object("Show one class.", _IN_PATH),
        Command(
            "set",
            "Change a class. The change applies from the next request, at every gateway within seconds.",
            method="PATCH",
            parameters=(_IN_PATH, _RANK, *_TERMS),
            lacks="nothing to change; give --ttft-s, --rank or another option",
        ),
        Command(
            "create",
            "Create a class; it needs --ttft-s or --completion-s.",
            method="POST",
            parameters=(_NAME, replace(_RANK, is_required=True), *_TERMS),
        ),
        Command.delete_object("Delete a class that is not built in and that no tenant uses.", _IN_PATH),
    ),
    apply_kind="moiety_platform.classes.declared:CLASS",
)
