"""Reads the limits of scopes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import structlog
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import among, read_rows
from moiety_platform.quota.kinds import Kind, Scope
from moiety_platform.quota.models import Quota

_SCOPES_AT_ONCE = 1000
_KINDS = {kind.value: kind for kind in Kind}

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Limit:
    """One limit of one scope."""

    quota_id: str
    scope: Scope
    kind: Kind
    cap: int


async def load_limits(session: AsyncSession, scopes: Iterable[Scope]) -> dict[Scope, list[Limit]]:
    """The limits of each of the scopes, by one statement for a thousand. One of a kind that only a later release knows
    is left to gateways of that release, and said so."""
    found: dict[Scope, list[Limit]] = {scope: [] for scope in scopes}
    by_name = {(scope.level.value, scope.id): scope for scope in found}
    names = list(by_name)
    for first in range(0, len(names), _SCOPES_AT_ONCE):
        columns = (Quota.level, Quota.scope_id)
        wanted = among(session, columns, names[first : first + _SCOPES_AT_ONCE])
        statement = select(Quota.id, *columns, Quota.kind, Quota.cap).where(wanted)
        for quota_id, level, scope_id, kind, cap in sorted(await read_rows(session, statement)):
            if kind not in _KINDS:
                log.warning("limit_of_unknown_kind", kind=kind, quota_id=quota_id)
                continue
            scope = by_name[level, scope_id]
            found[scope].append(Limit(quota_id, scope, _KINDS[kind], cap))
    return found
