"""Sets, finds and deletes routes within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

import math

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.row_limits import get_or_add
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.model_routes.models import RouteRecord
from moiety_platform.model_routes.schemas import (
    MAX_FALLBACKS,
    MAX_PERCENT,
    MAX_TARGETS,
    MAX_WEIGHT,
    MIN_PERCENT,
    MIN_SHADOW_PERCENT,
    NewRoute,
)
from moiety_platform.model_routes.terms import ModelRoute, RouteTarget, Stickiness
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_wire.shared_fields import copy_fields

MAX_ROUTES = 1000

_targets = msgspec.json.Decoder(tuple[RouteTarget, ...])
_names = msgspec.json.Decoder(tuple[str, ...])


async def load_routes(session: AsyncSession) -> dict[str, ModelRoute]:
    """Return all routes by name, in the order of names."""
    found = await session.scalars(select(RouteRecord).order_by(RouteRecord.name))
    return {record.name: _route_of(record) for record in found}


async def find_route(session: AsyncSession, name: str) -> ModelRoute | None:
    """Return the route, or None."""
    record = await _find(session, name)
    return None if record is None else _route_of(record)


async def get_route(session: AsyncSession, name: str) -> ModelRoute:
    """Return the route. Raises NotFound."""
    return _route_of(await _get(session, name))


async def set_route(session: AsyncSession, new: NewRoute) -> ModelRoute:
    """Set or change a route. Raises BadRequest, or Conflict where there are too many.

    It applies to requests that begin from then on, at every gateway within seconds.
    """
    route = _checked(new)
    advice = "delete some that no client uses"
    record = await get_or_add(session, RouteRecord, {"name": route.name}, MAX_ROUTES, "routes", advice)
    record.targets = msgspec.json.encode(route.targets).decode()
    record.fallbacks = msgspec.json.encode(route.fallbacks).decode()
    record.sticky = route.sticky.value
    record.downgrade_model, record.downgrade_percent = route.downgrade_model, route.downgrade_percent
    record.shadow_model, record.shadow_percent = route.shadow_model, route.shadow_percent
    await session.flush()
    return route


async def delete_route(session: AsyncSession, name: str) -> ModelRoute:
    """Delete a route. Raises NotFound."""
    record = await _get(session, name)
    await session.delete(record)
    await session.flush()
    return _route_of(record)


async def _find(session: AsyncSession, name: str) -> RouteRecord | None:
    return await session.get(RouteRecord, name) if len(name) <= MAX_MODEL_LENGTH and name.isprintable() else None


async def _get(session: AsyncSession, name: str) -> RouteRecord:
    record = await _find(session, name)
    if record is None:
        raise NotFound("There is no route with this name; list them with GET /admin/v1/routes.", param="route")
    return record


def _checked(new: NewRoute) -> ModelRoute:
    """Return the route that a body describes. Raises BadRequest."""
    _check_model(new.name, "name")
    if not 0 < len(new.targets) <= MAX_TARGETS:
        raise BadRequest(f"'targets' must have 1 to {MAX_TARGETS} models.", param="targets")
    for target in new.targets:
        _check_model(target.model, "targets")
        if not 0 <= target.weight <= MAX_WEIGHT:
            raise BadRequest(f"A weight in 'targets' must be from 0 to {MAX_WEIGHT}.", param="targets")
    if len({target.model for target in new.targets}) < len(new.targets):
        raise BadRequest("'targets' must name each model once; add up the weights.", param="targets")
    if not any(target.weight for target in new.targets):
        raise BadRequest("At least one weight in 'targets' must be above 0.", param="targets")
    if len(new.fallbacks) > MAX_FALLBACKS or len(set(new.fallbacks)) < len(new.fallbacks):
        raise BadRequest(f"'fallbacks' must be at most {MAX_FALLBACKS} different models.", param="fallbacks")
    for model in new.fallbacks:
        _check_model(model, "fallbacks")
    if new.sticky not in frozenset(Stickiness):
        raise BadRequest(f"'sticky' must be one of {', '.join(Stickiness)}.", param="sticky")
    _check_pair(new.downgrade_model, new.downgrade_percent, "downgrade", MIN_PERCENT)
    _check_pair(new.shadow_model, new.shadow_percent, "shadow", MIN_SHADOW_PERCENT)
    return copy_fields(
        new,
        ModelRoute,
        targets=tuple(RouteTarget(target.model, target.weight) for target in new.targets),
        fallbacks=tuple(new.fallbacks),
        sticky=Stickiness(new.sticky),
    )


def _check_model(name: str, param: str) -> None:
    if not (0 < len(name) <= MAX_MODEL_LENGTH and name.isprintable()):
        raise BadRequest(f"Names in '{param}' must have 1 to {MAX_MODEL_LENGTH} printable characters.", param=param)


def _check_pair(model: str | None, percent: float | None, kind: str, least: float) -> None:
    if (model is None) != (percent is None):
        missing = f"{kind}_model" if model is None else f"{kind}_percent"
        message = f"'{kind}_model' and '{kind}_percent' go together; add '{missing}', or leave out both."
        raise BadRequest(message, param=missing)
    if model is None or percent is None:
        return
    _check_model(model, f"{kind}_model")
    if not (math.isfinite(percent) and least <= percent <= MAX_PERCENT):
        message = f"'{kind}_percent' must be from {least} to {MAX_PERCENT}."
        raise BadRequest(message, param=f"{kind}_percent")


def _route_of(record: RouteRecord) -> ModelRoute:
    return copy_fields(
        record,
        ModelRoute,
        targets=_targets.decode(record.targets),
        fallbacks=_names.decode(record.fallbacks),
        sticky=Stickiness(record.sticky),
    )
