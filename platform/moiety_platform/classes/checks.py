"""Validation of a class, alone and against the others. Pure; every failure is a BadRequest that says what to do."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from moiety_platform.classes.models import MAX_CLASS_NAME_LENGTH
from moiety_platform.classes.terms import ClassTerms
from moiety_platform.errors import BadRequest
from moiety_platform.openapi.schemas import shows
from moiety_wire.classes import SPECULATIVE_PREFILL, OverloadAction

MAX_RANK = 1000
MAX_SECONDS = 30 * 86_400.0
MIN_SECONDS = 0.001
MAX_WEIGHT = 1000.0
MIN_WEIGHT = 0.001
MAX_PRICE_FACTOR = 100.0
MAX_CREDIT_PERCENT = 100
MAX_SPOT_PERCENT = 100

_NAME = re.compile(rf"[a-z][a-z0-9-]{{0,{MAX_CLASS_NAME_LENGTH - 1}}}", re.ASCII)
CLASS_NAME = shows(pattern=f"^{_NAME.pattern}$")
RANK = shows(minimum=0, maximum=MAX_RANK)
WEIGHT = shows(minimum=MIN_WEIGHT, maximum=MAX_WEIGHT)
SECONDS = shows(minimum=MIN_SECONDS, maximum=MAX_SECONDS)
ALLOWANCE = shows(minimum=0, maximum=MAX_SECONDS)
FACTOR = shows(minimum=0, maximum=MAX_PRICE_FACTOR)
CREDIT = shows(minimum=0, maximum=MAX_CREDIT_PERCENT)
SPOT_SHARE = shows(minimum=1, maximum=MAX_SPOT_PERCENT)
ACTION = shows(enum=list(OverloadAction))
SLO_RULES = (
    {"anyOf": [{"required": [name], "properties": {name: {"type": "number"}}} for name in ("ttft_s", "completion_s")]},
    {
        "if": {"required": ["tpot_s"], "properties": {"tpot_s": {"type": "number"}}},
        "then": {"required": ["ttft_s"], "properties": {"ttft_s": {"type": "number"}}},
    },
    {
        "if": {"required": ["on_overload"], "properties": {"on_overload": {"const": OverloadAction.DOWNGRADE}}},
        "then": {"required": ["downgrade_to"], "properties": {"downgrade_to": {"type": "string"}}},
    },
)
"""JSON schemas that a new class must satisfy."""

_TIMES = ("ttft_s", "tpot_s", "completion_s", "max_queue_s")


def is_class_name(name: str) -> bool:
    """Return whether this is a valid class name, worth a look-up."""
    return _NAME.fullmatch(name) is not None


def check_class_name(name: str) -> str:
    if not is_class_name(name):
        raise BadRequest(
            f"'name' must have 1 to {MAX_CLASS_NAME_LENGTH} lower-case letters, digits and hyphens, and begin with a "
            "letter, such as 'gold-2'.",
            param="name",
        )
    if name == SPECULATIVE_PREFILL:
        raise BadRequest(
            "The name 'speculative_prefill' is reserved for the metrics of speculative prefill; choose another 'name'.",
            param="name",
        )
    return name


def parse_action(action: str) -> OverloadAction:
    if action not in frozenset(OverloadAction):
        raise BadRequest(
            f"'on_overload' must be one of: {', '.join(OverloadAction)}, not {action[:64]!r}.", param="on_overload"
        )
    return OverloadAction(action)


def check_terms(terms: ClassTerms, classes: Mapping[str, ClassTerms]) -> None:
    """Check one class against the others of the deployment. Raises BadRequest."""
    service = terms.service
    if not 0 <= service.rank <= MAX_RANK:
        raise BadRequest(f"'rank' must be from 0 (highest) to {MAX_RANK}, not {service.rank}.", param="rank")
    _check_range("weight", service.weight, MIN_WEIGHT, MAX_WEIGHT)
    for name in _TIMES:
        value = getattr(service, name)
        if value is not None:
            _check_range(name, value, MIN_SECONDS, MAX_SECONDS)
    _check_range("ttft_per_1k_s", service.ttft_per_1k_s, 0.0, MAX_SECONDS)
    _check_range("price_factor", terms.price_factor, 0.0, MAX_PRICE_FACTOR)
    _check_range("credit_percent", terms.credit_percent, 0, MAX_CREDIT_PERCENT)
    _check_spot(terms, classes)
    if complaint := service.complaint():
        message = f"The class {service.name!r} has an invalid SLO: {complaint}."
        raise BadRequest(message, code="invalid_slo")
    _check_downgrade(terms, classes)
    for other in classes.values():
        if other.downgrade_to == service.name and other.service.rank >= service.rank:
            raise BadRequest(
                f"The class {other.service.name!r} (rank {other.service.rank}) falls back to {service.name!r}, so its "
                f"rank must stay above {other.service.rank}; change that class's 'downgrade_to' first.",
                param="rank",
            )


def check_spot_bounds(floor: int | None, ceiling: int | None) -> tuple[int, int] | None:
    """Return the bounds of a spot class's price, None for a class that is none. Raises BadRequest."""
    if floor is None and ceiling is None:
        return None
    if floor is None or ceiling is None:
        missing = "spot_floor_percent" if floor is None else "spot_ceiling_percent"
        raise BadRequest(
            f"{missing!r} is missing: a spot class needs the floor and the ceiling of its price, both in percent of "
            "the class's price.",
            param=missing,
        )
    for name, value in (("spot_floor_percent", floor), ("spot_ceiling_percent", ceiling)):
        _check_range(name, value, 1, MAX_SPOT_PERCENT)
    if floor > ceiling:
        raise BadRequest(
            f"'spot_floor_percent' must be at most 'spot_ceiling_percent' ({ceiling}), not {floor}.",
            param="spot_floor_percent",
        )
    return floor, ceiling


def _check_spot(terms: ClassTerms, classes: Mapping[str, ClassTerms]) -> None:
    """Check that spot classes are behind all others, and have no SLO, which idle capacity cannot attain.

    Raises BadRequest.
    """
    service = terms.service
    others = [other.service for name, other in classes.items() if name != service.name and not other.spot]
    if terms.spot is None:
        spots = [other for name, other in classes.items() if name != service.name and other.spot]
        before = min((other.service.rank for other in spots), default=MAX_RANK + 1)
        if service.rank >= before:
            raise BadRequest(
                f"'rank' must be below {before}, the rank of a spot class, which is served after all other classes.",
                param="rank",
            )
        return
    after = max((other.rank for other in others), default=-1)
    if service.rank <= after:
        raise BadRequest(
            f"'rank' of a spot class must be above {after}, so that it is served after all other classes, not "
            f"{service.rank}.",
            param="rank",
        )
    wrong = {
        "ttft_s": service.ttft_s is not None,
        "preemptible": not service.preemptible,
        "on_overload": service.on_overload is not OverloadAction.QUEUE,
        "credit_percent": terms.credit_percent > 0,
    }
    if any(wrong.values()):
        raise BadRequest(
            "A spot class has 'completion_s' without 'ttft_s', is preemptible, has 'on_overload' queue and no "
            "'credit_percent', since it is served with idle capacity only.",
            param=next(name for name, is_wrong in wrong.items() if is_wrong),
        )


def _check_downgrade(terms: ClassTerms, classes: Mapping[str, ClassTerms]) -> None:
    """Check that a fallback has a higher rank number, so that fallbacks never form a cycle. Raises BadRequest."""
    service, target = terms.service, terms.downgrade_to
    lower = [name for name, other in classes.items() if other.service.rank > service.rank and name != service.name]
    choice = f"choose one of: {', '.join(sorted(lower))}" if lower else "there is none yet, so create one first"
    if target is None:
        if service.on_overload is OverloadAction.DOWNGRADE:
            raise BadRequest(
                f"'downgrade_to' is missing: with 'on_overload' downgrade it must name a class with a rank above "
                f"{service.rank}; {choice}.",
                param="downgrade_to",
            )
        return
    if target in lower and classes[target].spot is not None:
        raise BadRequest(
            f"'downgrade_to' cannot be the spot class {target!r}: its price changes, and a request agrees to it by "
            "naming the class.",
            param="downgrade_to",
        )
    if target not in lower:
        raise BadRequest(
            f"'downgrade_to' must name another class with a rank above {service.rank}, not {target[:64]!r}; {choice}.",
            param="downgrade_to",
        )


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadRequest(f"'{name}' must be a number from {low:g} to {high:g}, not {value:g}.", param=name)
