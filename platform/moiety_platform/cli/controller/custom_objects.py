"""Custom resources as the Kubernetes API stores them, and the condition that says whether one is applied. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

EPOCH = datetime.fromtimestamp(0, UTC)


class CustomKind(StrEnum):
    """Kinds of the API group `moiety.dev`."""

    TENANT = "Tenant"
    API_KEY = "ApiKey"
    LIMIT = "Limit"


@dataclass(frozen=True)
class CustomObject:
    """An object as the API stores it."""

    kind: CustomKind
    name: str
    generation: int
    spec: Mapping[str, Any]
    conditions: tuple[Mapping[str, Any], ...] = ()
    created_at: datetime = EPOCH

    @property
    def ref(self) -> tuple[CustomKind, str]:
        return self.kind, self.name


Ref = tuple[CustomKind, str]


def new_condition(one: CustomObject, problem: str, now: str) -> dict[str, Any] | None:
    """Return the condition Ready of an object, None if it has that already. `now` is a time of RFC 3339."""
    status, reason = ("True", "Applied") if not problem else ("False", "NotApplied")
    before = next((dict(found) for found in one.conditions if found.get("type") == "Ready"), {})
    wanted = {
        "type": "Ready",
        "status": status,
        "reason": reason,
        "message": problem[:MAX_MESSAGE],
        "observedGeneration": one.generation,
    }
    if {name: before.get(name) for name in wanted} == wanted:
        return None
    changed = before.get("status") != status
    return {**wanted, "lastTransitionTime": now if changed else before.get("lastTransitionTime", now)}


MAX_MESSAGE = 32_768  # of a condition's message in Kubernetes
