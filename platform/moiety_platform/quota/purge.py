"""Purge of limits' remains and of windows that ended long ago, in small batches within the caller's transaction.

Windows are locked before their leases, as everywhere; rows that others have locked are left to the next run. Nothing is
booked into a deleted window any more: the use is in the ledger.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import delete, exists, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.bulk import in_rows
from moiety_platform.quota.kinds import ALWAYS
from moiety_platform.quota.models import Quota, QuotaLease, QuotaRate, QuotaWindow

WINDOWS_AT_ONCE = 100  # each has a lease for every process with a part of it
RATES_AT_ONCE = 500


async def purge_windows(session: AsyncSession, before: datetime) -> int:
    """Delete some windows that began before `before`, with their leases; return the number of rows."""
    key = QuotaWindow.quota_id, QuotaWindow.start
    old = select(*key).where(QuotaWindow.start < before, QuotaWindow.start != ALWAYS).order_by(QuotaWindow.start)
    found = await session.execute(old.limit(WINDOWS_AT_ONCE).with_for_update(skip_locked=True))
    windows = [tuple(row) for row in found]
    if not windows:
        return 0
    leases = delete(QuotaLease).where(in_rows(session, (QuotaLease.quota_id, QuotaLease.start), windows))
    num_leases = len((await session.execute(leases.returning(QuotaLease.replica_id))).all())
    await session.execute(delete(QuotaWindow).where(in_rows(session, key, windows)))
    return num_leases + len(windows)


async def purge_abandoned_rates(session: AsyncSession) -> int:
    """Delete some rates and endless windows without limit and without leases; return their number."""
    rates = select(QuotaRate.quota_id).where(~exists().where(Quota.id == QuotaRate.quota_id))
    rate_ids = (await session.scalars(rates.limit(RATES_AT_ONCE).with_for_update(skip_locked=True))).all()
    if rate_ids:
        await session.execute(delete(QuotaRate).where(QuotaRate.quota_id.in_(rate_ids)))
    leased = QuotaLease.quota_id == QuotaWindow.quota_id, QuotaLease.start == ALWAYS
    forsaken = (
        QuotaWindow.start == ALWAYS,
        ~exists().where(Quota.id == QuotaWindow.quota_id),
        ~exists().where(*leased),
    )
    windows = select(QuotaWindow.quota_id).where(*forsaken).limit(WINDOWS_AT_ONCE)
    window_ids = (await session.scalars(windows.with_for_update(of=QuotaWindow, skip_locked=True))).all()
    if window_ids:
        gone = QuotaWindow.start == ALWAYS, QuotaWindow.quota_id.in_(window_ids)
        await session.execute(delete(QuotaWindow).where(*gone, ~exists().where(*leased)))
    return len(rate_ids) + len(window_ids)
