"""Loading of the limits of scopes."""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from sqlalchemy import select, tuple_
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import BulkStatement
from moiety_platform.quota.kinds import Limit, LimitKind, Scope
from moiety_platform.quota.models import Quota

_SCOPES_AT_ONCE = 1000
_KINDS = {kind.value: kind for kind in LimitKind}
_SCOPE = (Quota.level, Quota.scope_id)

_of_scopes = BulkStatement(
    _SCOPE, lambda given, _: select(Quota.id, *_SCOPE, Quota.kind, Quota.cap).where(tuple_(*_SCOPE).in_(given))
)

log = structlog.get_logger(__name__)


async def load_limits(session: AsyncSession, scopes: Iterable[Scope]) -> dict[Scope, list[Limit]]:
    """Return the limits of each scope, with one statement per thousand scopes.

    Limits of kinds that only a later release knows are skipped with a warning; gateways of that release enforce them.
    """
    found: dict[Scope, list[Limit]] = {scope: [] for scope in scopes}
    by_name = {(scope.level.value, scope.id): scope for scope in found}
    names = list(by_name)
    for first in range(0, len(names), _SCOPES_AT_ONCE):
        rows = await _of_scopes.read(session, names[first : first + _SCOPES_AT_ONCE])
        for quota_id, level, scope_id, kind, cap in sorted(map(tuple, rows)):
            if kind not in _KINDS:
                log.warning(
                    "limit_of_unknown_kind",
                    kind=kind,
                    quota_id=quota_id,
                    advice="run the release of the gateway that created this quota, or delete it; it is not enforced",
                )
                continue
            scope = by_name[level, scope_id]
            found[scope].append(Limit(quota_id, scope, _KINDS[kind], cap))
    return found
