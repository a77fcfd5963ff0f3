"""Budgets: limits on money of tenants, projects and keys, with their burn-down. Within the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timedelta

from sqlalchemy import false, or_, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.db.paging import PageRequest, read_page
from moiety_platform.quota.kinds import LimitKind, LimitLevel, Period, Unit, window_end, window_start
from moiety_platform.quota.models import Quota, QuotaWindow
from moiety_platform.quota.owners import own_quota
from moiety_platform.spend.forecast import DailySpend, rate_of, read_since
from moiety_platform.spend.queries import spend_by_slot
from moiety_platform.spend.schemas import BudgetPage, BudgetPoint, BudgetView
from moiety_platform.tenants.checks import is_id
from moiety_platform.tenants.models import ApiKey
from moiety_platform.usage.queries import UsageFilter
from moiety_wire.shared_fields import copy_fields

MONEY_KINDS = tuple(kind for kind in LimitKind if kind.unit is Unit.MONEY)

Spend = dict[datetime, int]
"""Cost of each slot, a day or an hour, by its start."""


async def list_budgets(session: AsyncSession, page: PageRequest, now: datetime, tenant_id: str | None) -> BudgetPage:
    """Return a page of limits on money, oldest first; with `tenant_id`, those of it, its projects and its keys.

    Needs a stable snapshot, as `sum_usage` does.
    """
    statement = select(Quota).where(Quota.kind.in_(MONEY_KINDS))
    if tenant_id is not None:
        statement = statement.where(own_quota(tenant_id) if is_id(tenant_id) else false())
    quotas, next_cursor = await read_page(session, statement, page, Quota.created_at, Quota.id)
    days, hours = await _spend_of(session, quotas, now)
    used = await _used(session, quotas, now)
    return BudgetPage(
        [_view(one, used.get(one.id, 0), days[one.id], hours[one.id], now) for one in quotas], next_cursor
    )


async def _used(session: AsyncSession, quotas: Sequence[Quota], now: datetime) -> dict[str, int]:
    """Return what each limit has counted in its present window."""
    starts = {one.id: window_start(LimitKind(one.kind).period, now) for one in quotas}
    windows = select(QuotaWindow.quota_id, QuotaWindow.start, QuotaWindow.settled).where(
        QuotaWindow.quota_id.in_(starts), QuotaWindow.start.in_(set(starts.values()))
    )
    return {name: settled for name, start, settled in await session.execute(windows) if start == starts[name]}


async def _spend_of(
    session: AsyncSession, quotas: Sequence[Quota], now: datetime
) -> tuple[Mapping[str, Spend], Mapping[str, Spend]]:
    """Return the spend of each limit's scope by day, since `read_since`, and by hour, today.

    The spend of today is the sum of its hours, so that these are read once.
    """
    days: dict[str, Spend] = {}
    hours: dict[str, Spend] = {}
    today = window_start(Period.DAY, now)
    for level in LimitLevel:
        here = [one for one in quotas if one.level == level]
        ids = await _ids_of(session, level, {one.scope_id for one in here})
        ids_of: defaultdict[str, list[str]] = defaultdict(list)
        for one, scope in ids.items():
            ids_of[scope].append(one)
        for found, slot, since, until in ((days, "day", read_since(now), today), (hours, "hour", today, now)):
            if not ids or since >= until:
                continue
            among = f"{level}_id", tuple(ids)
            by_id = await spend_by_slot(session, UsageFilter(since, until, among=among), slot, level.value)
            for quota in here:
                found[quota.id] = _added(by_id[one] for one in ids_of[quota.scope_id] if one in by_id)
    for quota in quotas:
        spent_today = sum(hours.get(quota.id, {}).values())
        days[quota.id] = days.get(quota.id, {}) | ({today: spent_today} if spent_today else {})
        hours.setdefault(quota.id, {})
    return days, hours


async def _ids_of(session: AsyncSession, level: LimitLevel, scope_ids: set[str]) -> dict[str, str]:
    """Return the scope of each id that usage rows have: for a key also the ids of the keys that replaced it."""
    ids = {one: one for one in scope_ids}
    if level is LimitLevel.KEY and scope_ids:
        keys = select(ApiKey.id, ApiKey.root_id).where(or_(ApiKey.id.in_(scope_ids), ApiKey.root_id.in_(scope_ids)))
        ids |= {key_id: root_id or key_id for key_id, root_id in await session.execute(keys)}
    return ids


def _added(parts: Iterable[Spend]) -> Spend:
    total: defaultdict[datetime, int] = defaultdict(int)
    for part in parts:
        for at, amount in part.items():
            total[at] += amount
    return dict(total)


def _view(quota: Quota, used: int, days: DailySpend, hours: Spend, now: datetime) -> BudgetView:
    period = LimitKind(quota.kind).period
    assert period is not None, "limits on money have windows"
    start = window_start(period, now)
    end = window_end(period, start)
    slots, step = (hours, timedelta(hours=1)) if period is Period.DAY else (days, timedelta(days=1))
    inside = {at: amount for at, amount in sorted(slots.items()) if at >= start and amount}
    rate = rate_of(days, now)
    left = rate.time_for(quota.cap - used)
    is_exhausted = left is not None and now + left < end
    return copy_fields(
        quota,
        BudgetView,
        quota_id=quota.id,
        cap_nanodollars=quota.cap,
        used_nanodollars=used,
        window_start=start,
        window_end=end,
        spent_nanodollars=sum(inside.values()),
        rate_nanodollars_per_day=rate.nanodollars_per_day,
        forecast_nanodollars=used + rate.spend_in(end - now),
        exhausted_at=now + left if left is not None and is_exhausted else None,
        burn_down=_burn_down(quota.cap, inside, step, start, now),
    )


def _burn_down(cap: int, slots: Spend, step: timedelta, start: datetime, now: datetime) -> list[BudgetPoint]:
    points, left = [BudgetPoint(start, cap)], cap
    for at, amount in slots.items():
        left -= amount
        points.append(BudgetPoint(min(at + step, now), left))
    if points[-1].at < now:
        points.append(BudgetPoint(now, left))
    return points
