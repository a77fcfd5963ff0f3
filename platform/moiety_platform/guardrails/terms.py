"""Terms of a guardrail. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

import msgspec

ENTRY_POINT_GROUP = "moiety.guardrails"  # of Python packages, for checks as functions
ALL_TENANTS = ""  # key of the guardrails of tenants without one of their own


class GuardrailStage(StrEnum):
    """The text that is checked."""

    INPUT = "input"  # of the request, before an engine gets it
    OUTPUT = "output"  # of the answer


class GuardrailAction(StrEnum):
    """Effect of a finding."""

    BLOCK = "block"
    OBSERVE = "observe"


class GuardrailFailure(StrEnum):
    """Effect of a check that fails or does not end in time."""

    OPEN = "open"  # the text passes
    CLOSED = "closed"  # the request fails


class Detector(StrEnum):
    """Built-in detectors."""

    SECRETS = "secrets"
    CARD_NUMBERS = "card_numbers"


class Guardrail(msgspec.Struct, frozen=True, kw_only=True):
    """One guardrail: built-in detectors, an HTTP endpoint, or the entry point of a Python package.

    `tenant_id` None: for every tenant. `memory_mb` limits each process of an entry point.
    """

    name: str
    stage: GuardrailStage
    action: GuardrailAction
    on_failure: GuardrailFailure
    detectors: tuple[Detector, ...] = ()
    url: str | None = None
    entry_point: str | None = None
    timeout_ms: int = 1000
    memory_mb: int = 512
    tenant_id: str | None = None


def by_tenant(guardrails: Iterable[Guardrail]) -> Mapping[str, tuple[Guardrail, ...]]:
    """Return the guardrails of each tenant that has one of its own, and under ALL_TENANTS those of the others."""
    listed = list(guardrails)
    general = tuple(one for one in listed if one.tenant_id is None)
    tenants = {one.tenant_id for one in listed if one.tenant_id is not None}
    found = {tenant: tuple(one for one in listed if one.tenant_id in (None, tenant)) for tenant in tenants}
    return {**found, ALL_TENANTS: general}
