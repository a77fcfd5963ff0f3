"""Declaration of routes as an administered resource. A route has no id: its name identifies it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from moiety_platform.access.actions import MANAGED_BY_OPERATORS
from moiety_platform.resources.commands import Command, Parameter, the_model
from moiety_platform.resources.declaration import Resource

_NAME = Parameter.argument("name", "Name of the route: the model that clients ask for.")
_IN_QUERY = _NAME.in_query("route")


def parse_targets(text: str) -> list[dict[str, Any]]:
    """Return targets from text such as `small=90,large=10`; a model without a weight has the weight 1.

    Raises ValueError.
    """
    targets = []
    for part in text.split(","):
        model, has_weight, weight = part.strip().rpartition("=")
        if not has_weight:
            model, weight = weight, "1"
        if not model or not weight.isdecimal():
            raise ValueError(f"must be models with weights, such as small=90,large=10, not {text!r}")
        targets.append({"model": model, "weight": int(weight)})
    return targets


def models_of_targets(targets: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the models of targets."""
    return [target["model"] for target in targets]


def parse_names(text: str) -> list[str]:
    """Return the names in a text, which commas separate."""
    return [name.strip() for name in text.split(",") if name.strip()]


def plain(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row with its lists as the commands take them."""
    targets = ", ".join(f"{target['model']}={target['weight']}" for target in row["targets"])
    downgrade = f"{row['downgrade_model']} at {row['downgrade_percent']} %" if row["downgrade_model"] else None
    shadow = f"{row['shadow_model']} {row['shadow_percent']:g} %" if row["shadow_model"] else None
    shown = {"targets": targets, "fallbacks": ", ".join(row["fallbacks"]) or None}
    return {**row, **shown, "downgrade_model": downgrade, "shadow_model": shadow}


ROUTES = Resource(
    name="route",
    help="List, show, set and delete routes: aliases, weighted targets, fallbacks, downgrades and shadow traffic.",
    access=MANAGED_BY_OPERATORS,
    page="routes.md",
    columns={
        "name": "name",
        "targets": "targets",
        "fallbacks": "fallbacks",
        "sticky": "sticky",
        "downgrade_model": "downgrade",
        "shadow_model": "shadow",
    },
    plain=plain,
    commands=(
        Command.list_objects("List all routes by name."),
        Command("show", "Show one route.", suffix="one", parameters=(_IN_QUERY,)),
        Command.set_object(
            "Set or replace a route. It applies to requests that begin later, at every gateway within seconds.",
            _NAME,
            Parameter(
                name="targets",
                flag="--to",
                parse=parse_targets,
                models_of=models_of_targets,
                help="Models that answer, with weights, such as small=90,large=10. One model is an alias.",
                is_required=True,
            ),
            Parameter(
                name="fallbacks",
                flag="--fallback",
                parse=parse_names,
                models_of=list,
                help="Models to use in this order, separated by commas, if the targets are overloaded, fail before "
                "the first token, or have no engine.",
            ),
            Parameter(
                name="sticky",
                help="What keeps its target while weights stay the same: tenant, conversation or none.",
            ),
            Parameter(
                name="downgrade_model",
                flag="--downgrade-to",
                models_of=the_model,
                help="Model that answers when a quota of the request is nearly used up.",
            ),
            Parameter(
                name="downgrade_percent",
                flag="--downgrade-at",
                type=int,
                help="Used percentage of a quota from which --downgrade-to applies, from 1 to 100.",
            ),
            Parameter(
                name="shadow_model",
                flag="--shadow-to",
                models_of=the_model,
                help="Model that gets copies of requests. Its answers are discarded and not billed.",
            ),
            Parameter(
                name="shadow_percent",
                type=float,
                help="Percentage of the requests that --shadow-to gets copies of.",
            ),
        ),
        Command.delete_object(
            "Delete a route. Requests for its name then go to the model of that name, if there is one.", _IN_QUERY
        ),
    ),
    apply_kind="moiety_platform.model_routes.declared:ROUTE",
)
