"""Request and response bodies of the admin API for guardrails."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.etags import Tagged
from moiety_platform.guardrails.models import MAX_NAME_LENGTH, MAX_URL_LENGTH
from moiety_platform.guardrails.terms import Detector, Guardrail, GuardrailAction, GuardrailFailure, GuardrailStage
from moiety_platform.openapi.schemas import shows
from moiety_wire.shared_fields import copy_fields

MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 10, 30_000
MIN_MEMORY_MB, MAX_MEMORY_MB = 16, 65_536
ENTRY_POINT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}", re.ASCII)
NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_NAME_LENGTH - 1}}}", re.ASCII)

_ABSENT: Mapping[str, Any] = {"detectors": {"maxItems": 0}, "url": {"type": "null"}, "entry_point": {"type": "null"}}
_GIVEN: Mapping[str, Any] = {"detectors": {"minItems": 1}, "url": {"type": "string"}, "entry_point": {"type": "string"}}


class NewGuardrail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A guardrail to set, which replaces the guardrail of the same name.

    It has `detectors`, which are built in, the `url` of an HTTP endpoint, or an `entry_point` of a Python package that
    is installed at the gateways, which checks in a process with at most `memory_mb` MiB.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {"anyOf": [{"required": [name], "properties": {**_ABSENT, name: given}} for name, given in _GIVEN.items()]},
    )

    name: Annotated[str, shows(pattern=f"^{NAME.pattern}$")]
    stage: Annotated[str, shows(enum=list(GuardrailStage))]
    action: Annotated[str, shows(enum=list(GuardrailAction))] = "block"
    on_failure: Annotated[str, shows(enum=list(GuardrailFailure))] = "closed"
    detectors: Annotated[list[Annotated[str, shows(enum=list(Detector))]], shows(uniqueItems=True)] = []
    url: Annotated[str, shows(minLength=1, maxLength=MAX_URL_LENGTH)] | None = None
    entry_point: Annotated[str, shows(pattern=f"^{ENTRY_POINT.pattern}$")] | None = None
    timeout_ms: Annotated[int, shows(minimum=MIN_TIMEOUT_MS, maximum=MAX_TIMEOUT_MS)] = 1000
    memory_mb: Annotated[int, shows(minimum=MIN_MEMORY_MB, maximum=MAX_MEMORY_MB)] = 512
    tenant_id: str | None = None


class GuardrailView(Tagged, frozen=True):
    """One guardrail."""

    name: str
    stage: str
    action: str
    on_failure: str
    detectors: list[str]
    url: str | None
    entry_point: str | None
    timeout_ms: int
    memory_mb: int
    tenant_id: str | None

    @classmethod
    def of(cls, guardrail: Guardrail) -> GuardrailView:
        texts = {name: getattr(guardrail, name).value for name in ("stage", "action", "on_failure")}
        return copy_fields(guardrail, cls, detectors=[one.value for one in guardrail.detectors], **texts)


class GuardrailViews(msgspec.Struct, frozen=True):
    """All guardrails by name."""

    data: list[GuardrailView]
