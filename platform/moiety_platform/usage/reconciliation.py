"""Reconciliation of all usage records: requests, ledger, sums of hours and days, and limits.

The sums of deleted requests are added to those of the existing ones.
"""

from __future__ import annotations

from collections import defaultdict
from datetime import datetime, timedelta
from typing import Any

import msgspec
from sqlalchemy import BigInteger, Select, case, cast, func, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.quota.models import LeaseState, QuotaLease, QuotaWindow
from moiety_platform.usage.days import longest_done
from moiety_platform.usage.models import EntryKind, LedgerEntry, UsageCut, UsageDay, UsageHour, UsageRecord
from moiety_platform.usage.quarantined_rows import EMPTY_QUARANTINE_REPORT, QuarantinedUsageReport
from moiety_wire.classes import SPECULATIVE_PREFILL

MAX_SHOWN = 100
_HOUR = timedelta(hours=1)
_NAMES = ("requests", "prompt_tokens", "cached_tokens", "output_tokens", "cost_nanodollars", "credit_nanodollars")
_CREDITED = case((LedgerEntry.kind == EntryKind.CREDITED, -LedgerEntry.cost_nanodollars), else_=0)


class Amounts(msgspec.Struct, frozen=True):
    """Usage according to one source: the requests, the ledger or the sums."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    cost_nanodollars: int = 0  # after credits
    credit_nanodollars: int = 0


class LedgerDifference(msgspec.Struct, frozen=True):
    """A tenant for which requests, ledger and hours differ."""

    tenant_id: str
    requests: Amounts
    ledger: Amounts
    hours: Amounts


class DaysDifference(msgspec.Struct, frozen=True):
    """A tenant for which the sums of days differ from those of their hours."""

    tenant_id: str
    hours: Amounts
    days: Amounts


class Window(msgspec.Struct, frozen=True):
    """A limit's window that differs from the sum of its leases, or in which more was settled than granted."""

    quota_id: str
    start: datetime
    granted: int
    settled: int
    granted_to_leases: int
    settled_by_leases: int


class QuarantinedLease(msgspec.Struct, frozen=True):
    """Leased amount of a dead gateway process that is not proven unspent; until then it counts as spent."""

    replica_id: str
    leases: int
    amount: int  # sum over tokens, requests and nano-dollars


class Reconciliation(msgspec.Struct, frozen=True):
    """Result of a reconciliation; `agrees` says that nothing differs and no usage is quarantined.

    Quarantined leases are no difference.
    """

    since: datetime
    until: datetime
    agrees: bool
    total: Amounts
    tenants: int
    differences: list[LedgerDifference]
    days: list[DaysDifference]
    windows: list[Window]
    quarantined: list[QuarantinedLease]
    quarantined_usage: QuarantinedUsageReport


async def take_snapshot_locks(session: AsyncSession) -> None:
    """Give the transaction one stable snapshot, as SQLite's transactions have by default.

    Call it before the first statement.
    """
    if session.get_bind().dialect.name == "postgresql":
        await session.connection(execution_options={"isolation_level": "REPEATABLE READ"})


async def reconcile(
    session: AsyncSession,
    since: datetime,
    until: datetime,
    quarantined_usage: QuarantinedUsageReport = EMPTY_QUARANTINE_REPORT,
) -> Reconciliation:
    """Compare the usage that started in these hours; the first and the last hour count as a whole.

    At most MAX_SHOWN differences of each kind are listed. `quarantined_usage` counts all quarantined usage of the
    gateway, whatever its time.
    """
    start, end = _floor(since), _floor(until) + (_HOUR if _floor(until) != until else timedelta())
    counted = func.sum(case((UsageRecord.endpoint != SPECULATIVE_PREFILL, 1), else_=0))
    requests = await _amounts(session, _of(UsageRecord, UsageRecord.started_at, counted, start, end))
    cut = await _amounts(session, _of(UsageCut, UsageCut.hour, func.sum(UsageCut.requests), start, end))
    for tenant_id, amounts in cut.items():
        requests[tenant_id] = _sum(requests[tenant_id], amounts)
    settled = func.sum(case((LedgerEntry.kind == EntryKind.SETTLED, 1), else_=0))
    ledger = await _amounts(session, _of(LedgerEntry, LedgerEntry.started_at, settled, start, end))
    hours = await _amounts(session, _of(UsageHour, UsageHour.hour, func.sum(UsageHour.requests), start, end))
    differences = [
        LedgerDifference(tenant_id, requests[tenant_id], ledger[tenant_id], hours[tenant_id])
        for tenant_id in sorted({*requests, *ledger, *hours})
        if not requests[tenant_id] == ledger[tenant_id] == hours[tenant_id]
    ]
    days, windows = await _different_days(session, start, end), await _unbalanced(session)
    return Reconciliation(
        since=start,
        until=end,
        agrees=not differences and not days and not windows and not quarantined_usage.total,
        total=_sum(*requests.values()),
        tenants=len(requests),
        differences=differences[:MAX_SHOWN],
        days=days[:MAX_SHOWN],
        windows=windows[:MAX_SHOWN],
        quarantined=await _quarantined(session),
        quarantined_usage=quarantined_usage,
    )


async def _different_days(session: AsyncSession, start: datetime, end: datetime) -> list[DaysDifference]:
    """Return the differences of the summed-up days within the time span."""
    done = await longest_done(session, start, end)
    if done is None:
        return []
    hours = await _amounts(session, _of(UsageHour, UsageHour.hour, func.sum(UsageHour.requests), *done))
    days = await _amounts(session, _of(UsageDay, UsageDay.day, func.sum(UsageDay.requests), *done))
    named = sorted({*hours, *days})
    return [DaysDifference(one, hours[one], days[one]) for one in named if hours[one] != days[one]]


def _sum(*parts: Amounts) -> Amounts:
    return Amounts(*(sum(getattr(part, name) for part in parts) for name in _NAMES))


def _floor(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def _of(table: Any, moment: Any, requests: Any, start: datetime, end: datetime) -> Select[Any]:
    columns = [getattr(table, name) for name in _NAMES[1:-1]]
    columns.append(_CREDITED if table is LedgerEntry else table.credit_nanodollars)
    sums = [cast(func.sum(column), BigInteger) for column in columns]
    statement = select(table.tenant_id, cast(requests, BigInteger), *sums).where(moment >= start, moment < end)
    return statement.group_by(table.tenant_id)


async def _amounts(session: AsyncSession, statement: Select[Any]) -> defaultdict[str, Amounts]:
    rows = await session.execute(statement)
    found = {tenant_id: Amounts(*amounts) for tenant_id, *amounts in rows}
    return defaultdict(Amounts, {tenant_id: one for tenant_id, one in found.items() if one != Amounts()})


async def _unbalanced(session: AsyncSession) -> list[Window]:
    leases = (
        select(
            QuotaLease.quota_id,
            QuotaLease.start,
            cast(func.sum(QuotaLease.granted), BigInteger).label("granted"),
            cast(func.sum(QuotaLease.settled), BigInteger).label("settled"),
        )
        .group_by(QuotaLease.quota_id, QuotaLease.start)
        .subquery()
    )
    granted, settled = func.coalesce(leases.c.granted, 0), func.coalesce(leases.c.settled, 0)
    columns = (QuotaWindow.quota_id, QuotaWindow.start, QuotaWindow.granted, QuotaWindow.settled, granted, settled)
    same = (leases.c.quota_id == QuotaWindow.quota_id) & (leases.c.start == QuotaWindow.start)
    wrong = or_(
        QuotaWindow.granted != granted, QuotaWindow.settled != settled, QuotaWindow.settled > QuotaWindow.granted
    )
    order = QuotaWindow.quota_id, QuotaWindow.start
    rows = await session.execute(select(*columns).outerjoin(leases, same).where(wrong).order_by(*order))
    return [Window(*row) for row in rows]


async def _quarantined(session: AsyncSession) -> list[QuarantinedLease]:
    left = QuotaLease.granted - QuotaLease.settled
    statement = (
        select(QuotaLease.replica_id, func.count(), cast(func.sum(left), BigInteger))
        .where(QuotaLease.state == LeaseState.QUARANTINED, left > 0)
        .group_by(QuotaLease.replica_id)
        .order_by(QuotaLease.replica_id)
        .limit(MAX_SHOWN)
    )
    return [QuarantinedLease(*row) for row in await session.execute(statement)]
