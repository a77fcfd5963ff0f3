"""Who holds what of the limits: the leases of gateways, and what is quarantined, as administrators see them."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.quota.kinds import ALWAYS
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease


class LeaseView(msgspec.Struct, frozen=True):
    """A gateway process's part of a limit's window. `left` is granted and not settled: of a live lease for requests
    that run or are to come, of a quarantined one it counts as spent until it is proven otherwise. `window_start` is
    null of a limit on open requests."""

    quota_id: str
    level: str
    scope_id: str
    kind: str
    cap: int
    window_start: datetime | None
    replica_id: str
    state: str
    granted: int
    settled: int
    left: int
    expires_at: datetime


class LeaseList(msgspec.Struct, frozen=True):
    """The leases that were renewed last, the newest first. `truncated` says that there are more."""

    data: list[LeaseView]
    truncated: bool


async def list_leases(session: AsyncSession, state: LeaseState, limit: int) -> LeaseList:
    """Leases in that state; of quarantined ones those with something left."""
    statement = select(QuotaLease, Quota).join(Quota, Quota.id == QuotaLease.quota_id)
    statement = statement.where(QuotaLease.state == state)
    if state is LeaseState.QUARANTINED:
        statement = statement.where(QuotaLease.granted > QuotaLease.settled)
    order = QuotaLease.expires_ms.desc(), QuotaLease.quota_id, QuotaLease.start, QuotaLease.replica_id
    rows = (await session.execute(statement.order_by(*order).limit(limit + 1))).all()
    return LeaseList([_view(lease, quota) for lease, quota in rows[:limit]], truncated=len(rows) > limit)


def _view(lease: QuotaLease, quota: Quota) -> LeaseView:
    return LeaseView(
        quota_id=quota.id,
        level=quota.level,
        scope_id=quota.scope_id,
        kind=quota.kind,
        cap=quota.cap,
        window_start=None if lease.start == ALWAYS else lease.start,
        replica_id=lease.replica_id,
        state=lease.state,
        granted=lease.granted,
        settled=lease.settled,
        left=lease.granted - lease.settled,
        expires_at=datetime.fromtimestamp(lease.expires_ms / 1000, UTC),
    )
