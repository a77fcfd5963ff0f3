"""Sets, finds and deletes guardrails within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from enum import StrEnum
from typing import Protocol, TypeVar

from sqlalchemy import func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.errors import BadRequest, Conflict, NotFound
from moiety_platform.guardrails.models import GuardrailRecord
from moiety_platform.guardrails.schemas import MAX_TIMEOUT_MS, MIN_TIMEOUT_MS, NAME, NewGuardrail
from moiety_platform.guardrails.terms import Detector, Guardrail, GuardrailAction, GuardrailFailure, GuardrailStage
from moiety_platform.tenants.models import Tenant

MAX_GUARDRAILS = 64

Choice = TypeVar("Choice", bound=StrEnum)


class UrlCheck(Protocol):
    """Policy that says which addresses an HTTP endpoint may have."""

    def check(self, text: str) -> str:
        """Return the URL as stored. Raises BadRequest."""
        ...


async def load_guardrails(session: AsyncSession) -> list[Guardrail]:
    """Return all guardrails by name."""
    found = await session.scalars(select(GuardrailRecord).order_by(GuardrailRecord.name))
    return [_guardrail_of(record) for record in found]


async def find_guardrail(session: AsyncSession, name: str) -> Guardrail | None:
    """Return the guardrail, or None."""
    record = await session.get(GuardrailRecord, name) if NAME.fullmatch(name) else None
    return None if record is None else _guardrail_of(record)


async def get_guardrail(session: AsyncSession, name: str) -> Guardrail:
    """Return the guardrail. Raises NotFound."""
    found = await find_guardrail(session, name)
    if found is None:
        raise NotFound("There is no guardrail with this name; list them with GET /admin/v1/guardrails.", param="name")
    return found


async def set_guardrail(session: AsyncSession, new: NewGuardrail, reach: UrlCheck) -> Guardrail:
    """Set or change a guardrail. Raises BadRequest, NotFound, or Conflict where there are too many.

    It applies to requests that begin from then on, at every gateway within seconds.
    """
    if not NAME.fullmatch(new.name):
        raise BadRequest("'name' must have 1 to 64 lower-case letters, digits and hyphens.", param="name")
    if bool(new.detectors) == (new.url is not None):
        raise BadRequest("A guardrail has either 'detectors' or a 'url'; give one of them.", param="detectors")
    if not MIN_TIMEOUT_MS <= new.timeout_ms <= MAX_TIMEOUT_MS:
        raise BadRequest(f"'timeout_ms' must be from {MIN_TIMEOUT_MS} to {MAX_TIMEOUT_MS}.", param="timeout_ms")
    detectors = tuple(dict.fromkeys(_choice(Detector, one, "detectors") for one in new.detectors))
    stage, action = _choice(GuardrailStage, new.stage, "stage"), _choice(GuardrailAction, new.action, "action")
    on_failure = _choice(GuardrailFailure, new.on_failure, "on_failure")
    url = None if new.url is None else reach.check(new.url)
    if new.tenant_id is not None and await session.get(Tenant, new.tenant_id[:64]) is None:
        raise NotFound("There is no tenant with this id; list them with GET /admin/v1/tenants.", param="tenant_id")
    record = await session.get(GuardrailRecord, new.name)
    if record is None:
        if (await session.scalar(select(func.count()).select_from(GuardrailRecord)) or 0) >= MAX_GUARDRAILS:
            raise Conflict(f"There are {MAX_GUARDRAILS} guardrails already; delete one.")
        record = GuardrailRecord(name=new.name)
        session.add(record)
    record.stage, record.action, record.on_failure = stage.value, action.value, on_failure.value
    record.detectors, record.url, record.timeout_ms = ",".join(detectors), url, new.timeout_ms
    record.tenant_id = new.tenant_id
    await session.flush()
    return _guardrail_of(record)


async def delete_guardrail(session: AsyncSession, name: str) -> Guardrail:
    """Delete a guardrail. Raises NotFound."""
    found = await get_guardrail(session, name)
    await session.delete(await session.get_one(GuardrailRecord, name))
    await session.flush()
    return found


def _choice(kind: type[Choice], value: str, param: str) -> Choice:
    if value not in frozenset(kind):
        raise BadRequest(f"'{param}' must be one of {', '.join(kind)}.", param=param)
    return kind(value)


def _guardrail_of(record: GuardrailRecord) -> Guardrail:
    return Guardrail(
        name=record.name,
        stage=GuardrailStage(record.stage),
        action=GuardrailAction(record.action),
        on_failure=GuardrailFailure(record.on_failure),
        detectors=tuple(map(Detector, record.detectors.split(","))) if record.detectors else (),
        url=record.url,
        timeout_ms=record.timeout_ms,
        tenant_id=record.tenant_id,
    )
