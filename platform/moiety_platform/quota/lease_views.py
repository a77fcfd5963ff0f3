"""Shares of gateways in the limits: their leases, including quarantined ones, as administrators see them."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.quota.kinds import ALWAYS
from moiety_platform.quota.models import LeaseState, Quota, QuotaLease
from moiety_wire.shared_fields import copy_fields


class LeaseView(msgspec.Struct, frozen=True):
    """A gateway process's part of a limit's window.

    `left` is granted and not settled: in a live lease it is for running and future requests; in a quarantined lease it
    counts as spent until it is proven unspent. `window_start` is null for a limit on open requests.
    """

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
    """Leases with the latest expiry first. `truncated` says that there are more."""

    data: list[LeaseView]
    truncated: bool


async def list_leases(session: AsyncSession, state: LeaseState, limit: int) -> LeaseList:
    """Return the leases in a state; of quarantined leases only those with something left."""
    statement = select(QuotaLease, Quota).join(Quota, Quota.id == QuotaLease.quota_id)
    statement = statement.where(QuotaLease.state == state)
    if state is LeaseState.QUARANTINED:
        statement = statement.where(QuotaLease.granted > QuotaLease.settled)
    order = QuotaLease.expires_ms.desc(), QuotaLease.quota_id, QuotaLease.start, QuotaLease.replica_id
    rows = (await session.execute(statement.order_by(*order).limit(limit + 1))).all()
    return LeaseList([_view(lease, quota) for lease, quota in rows[:limit]], truncated=len(rows) > limit)


def _view(lease: QuotaLease, quota: Quota) -> LeaseView:
    return copy_fields(
        lease,
        LeaseView,
        level=quota.level,
        scope_id=quota.scope_id,
        kind=quota.kind,
        cap=quota.cap,
        window_start=None if lease.start == ALWAYS else lease.start,
        left=lease.granted - lease.settled,
        expires_at=datetime.fromtimestamp(lease.expires_ms / 1000, UTC),
    )
