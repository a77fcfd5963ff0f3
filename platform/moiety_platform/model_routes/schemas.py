"""Request and response bodies of the admin API for routes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.etags import Tagged
from moiety_platform.model_routes.terms import ModelRoute, Stickiness
from moiety_platform.openapi.schemas import shows
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_wire.shared_fields import copy_fields

MAX_TARGETS = 16
MAX_FALLBACKS = 8
MAX_WEIGHT = 1_000_000
MIN_PERCENT, MAX_PERCENT = 1, 100
MIN_SHADOW_PERCENT = 0.001

ModelText = Annotated[str, shows(minLength=1, maxLength=MAX_MODEL_LENGTH, format="printable")]


class TargetBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of a route, and its share of the requests relative to the other targets. 0: no requests."""

    model: ModelText
    weight: Annotated[int, shows(minimum=0, maximum=MAX_WEIGHT)] = 1


def _together(model: str, percent: str) -> dict[str, Any]:
    """Return the JSON schema of two fields that are both given or both absent."""
    none, given = {"type": "null"}, {model: {"type": "string"}, percent: {"type": "number"}}
    return {"anyOf": [{"properties": {model: none, percent: none}}, {"required": list(given), "properties": given}]}


class NewRoute(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A route to set, which replaces the route of the same name.

    Requests for the model `name` are answered by one of `targets`, chosen by weight, and by the next target or fallback
    if it is overloaded, fails before its first token, or has no engine. One target is an alias.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"properties": {"targets": {"contains": {"properties": {"weight": {"minimum": 1}}}}}},
        _together("downgrade_model", "downgrade_percent"),
        _together("shadow_model", "shadow_percent"),
    )

    name: ModelText
    targets: Annotated[list[TargetBody], shows(minItems=1, maxItems=MAX_TARGETS)]
    fallbacks: Annotated[list[ModelText], shows(maxItems=MAX_FALLBACKS, uniqueItems=True)] = []
    sticky: Annotated[str, shows(enum=list(Stickiness))] = "none"
    downgrade_model: ModelText | None = None
    downgrade_percent: Annotated[int, shows(minimum=MIN_PERCENT, maximum=MAX_PERCENT)] | None = None
    shadow_model: ModelText | None = None
    shadow_percent: Annotated[float, shows(minimum=MIN_SHADOW_PERCENT, maximum=MAX_PERCENT)] | None = None


class RouteView(Tagged, frozen=True):
    """One route."""

    name: str
    targets: list[TargetBody]
    fallbacks: list[str]
    sticky: str
    downgrade_model: str | None
    downgrade_percent: int | None
    shadow_model: str | None
    shadow_percent: float | None

    @classmethod
    def of(cls, route: ModelRoute) -> RouteView:
        targets = [TargetBody(target.model, target.weight) for target in route.targets]
        return copy_fields(route, cls, targets=targets, fallbacks=list(route.fallbacks), sticky=route.sticky.value)


class RouteViews(msgspec.Struct, frozen=True):
    """All routes by name."""

    data: list[RouteView]
