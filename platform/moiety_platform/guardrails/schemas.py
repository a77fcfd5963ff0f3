"""Request and response bodies of the admin API for guardrails."""

from __future__ import annotations

import re
from typing import Annotated

import msgspec

from moiety_platform.etags import Tagged
from moiety_platform.guardrails.models import MAX_NAME_LENGTH, MAX_URL_LENGTH
from moiety_platform.guardrails.terms import Detector, Guardrail, GuardrailAction, GuardrailFailure, GuardrailStage
from moiety_platform.openapi.schemas import shows

MIN_TIMEOUT_MS, MAX_TIMEOUT_MS = 10, 30_000
NAME = re.compile(rf"[a-z0-9][a-z0-9-]{{0,{MAX_NAME_LENGTH - 1}}}", re.ASCII)


class NewGuardrail(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A guardrail to set, which replaces the guardrail of the same name.

    It has either `detectors`, which are built in, or the `url` of an HTTP endpoint.
    """

    name: Annotated[str, shows(pattern=f"^{NAME.pattern}$")]
    stage: Annotated[str, shows(enum=list(GuardrailStage))]
    action: Annotated[str, shows(enum=list(GuardrailAction))] = "block"
    on_failure: Annotated[str, shows(enum=list(GuardrailFailure))] = "closed"
    detectors: Annotated[list[Annotated[str, shows(enum=list(Detector))]], shows(uniqueItems=True)] = []
    url: Annotated[str, shows(minLength=1, maxLength=MAX_URL_LENGTH)] | None = None
    timeout_ms: Annotated[int, shows(minimum=MIN_TIMEOUT_MS, maximum=MAX_TIMEOUT_MS)] = 1000
    tenant_id: str | None = None


class GuardrailView(Tagged, frozen=True):
    """One guardrail."""

    name: str
    stage: str
    action: str
    on_failure: str
    detectors: list[str]
    url: str | None
    timeout_ms: int
    tenant_id: str | None

    @classmethod
    def of(cls, guardrail: Guardrail) -> GuardrailView:
        return cls(
            name=guardrail.name,
            stage=guardrail.stage.value,
            action=guardrail.action.value,
            on_failure=guardrail.on_failure.value,
            detectors=[detector.value for detector in guardrail.detectors],
            url=guardrail.url,
            timeout_ms=guardrail.timeout_ms,
            tenant_id=guardrail.tenant_id,
        )


class GuardrailViews(msgspec.Struct, frozen=True):
    """All guardrails by name."""

    data: list[GuardrailView]
