"""Sets, finds and deletes guardrails within the caller's transaction. Independent of HTTP."""

from __future__ import annotations

from enum import StrEnum
from importlib.metadata import entry_points
from typing import Protocol, TypeVar

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.row_limits import get_or_add
from moiety_platform.errors import BadRequest, NotFound
from moiety_platform.guardrails.models import ENTRY_POINT_SCHEME, GuardrailRecord
from moiety_platform.guardrails.schemas import (
    MAX_MEMORY_MB,
    MAX_TIMEOUT_MS,
    MIN_MEMORY_MB,
    MIN_TIMEOUT_MS,
    NAME,
    NewGuardrail,
)
from moiety_platform.guardrails.terms import (
    ENTRY_POINT_GROUP,
    Detector,
    Guardrail,
    GuardrailAction,
    GuardrailFailure,
    GuardrailStage,
)
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
    if bool(new.detectors) + (new.url is not None) + (new.entry_point is not None) != 1:
        message = "A guardrail has either 'detectors', a 'url' or an 'entry_point'; give one of them."
        raise BadRequest(message, param="detectors")
    if not MIN_MEMORY_MB <= new.memory_mb <= MAX_MEMORY_MB:
        raise BadRequest(f"'memory_mb' must be from {MIN_MEMORY_MB} to {MAX_MEMORY_MB}.", param="memory_mb")
    if not MIN_TIMEOUT_MS <= new.timeout_ms <= MAX_TIMEOUT_MS:
        raise BadRequest(f"'timeout_ms' must be from {MIN_TIMEOUT_MS} to {MAX_TIMEOUT_MS}.", param="timeout_ms")
    detectors = tuple(dict.fromkeys(_choice(Detector, one, "detectors") for one in new.detectors))
    stage, action = _choice(GuardrailStage, new.stage, "stage"), _choice(GuardrailAction, new.action, "action")
    on_failure = _choice(GuardrailFailure, new.on_failure, "on_failure")
    url = None if new.url is None else reach.check(new.url)
    if new.entry_point is not None:
        url = ENTRY_POINT_SCHEME + _installed(new.entry_point)
    if new.tenant_id is not None and await session.get(Tenant, new.tenant_id[:64]) is None:
        raise NotFound("There is no tenant with this id; list them with GET /admin/v1/tenants.", param="tenant_id")
    key = {"name": new.name}
    record = await get_or_add(session, GuardrailRecord, key, MAX_GUARDRAILS, "guardrails", "delete one")
    record.stage, record.action, record.on_failure = stage.value, action.value, on_failure.value
    record.detectors, record.url, record.timeout_ms = ",".join(detectors), url, new.timeout_ms
    record.tenant_id, record.memory_mb = new.tenant_id, new.memory_mb
    await session.flush()
    return _guardrail_of(record)


async def delete_guardrail(session: AsyncSession, name: str) -> Guardrail:
    """Delete a guardrail. Raises NotFound."""
    found = await get_guardrail(session, name)
    await session.delete(await session.get_one(GuardrailRecord, name))
    await session.flush()
    return found


def _installed(entry_point: str) -> str:
    """Return the name of an entry point. Raises BadRequest if no installed package has it."""
    names = sorted({found.name for found in entry_points(group=ENTRY_POINT_GROUP)})
    if entry_point not in names:
        raise BadRequest(
            f"No package that is installed at the gateway has the entry point {entry_point[:128]!r} in "
            f"{ENTRY_POINT_GROUP!r}; found: {', '.join(names) or 'none'}. Install it at every gateway.",
            param="entry_point",
        )
    return entry_point


def _choice(kind: type[Choice], value: str, param: str) -> Choice:
    if value not in frozenset(kind):
        raise BadRequest(f"'{param}' must be one of {', '.join(kind)}.", param=param)
    return kind(value)


def _guardrail_of(record: GuardrailRecord) -> Guardrail:
    is_python = record.url is not None and record.url.startswith(ENTRY_POINT_SCHEME)
    return Guardrail(
        name=record.name,
        stage=GuardrailStage(record.stage),
        action=GuardrailAction(record.action),
        on_failure=GuardrailFailure(record.on_failure),
        detectors=tuple(map(Detector, record.detectors.split(","))) if record.detectors else (),
        url=None if is_python else record.url,
        entry_point=(record.url or "").removeprefix(ENTRY_POINT_SCHEME) if is_python else None,
        timeout_ms=record.timeout_ms,
        memory_mb=record.memory_mb,
        tenant_id=record.tenant_id,
    )
