"""Queries of spend, over the same rows and sums as reports of usage. Within the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.spend.forecast import forecast_month, read_since
from moiety_platform.spend.schemas import DaySpend, SpendForecast, SpendGroup, SpendReport, SpendTotals
from moiety_platform.usage.queries import UsageFilter, source_of, sum_usage


async def report_spend(session: AsyncSession, usage_filter: UsageFilter, grouping: Sequence[str]) -> SpendReport:
    """Return spend per group. Needs a stable snapshot, and raises BadRequest, both as `sum_usage` does."""
    whole = await sum_usage(session, usage_filter, ())
    total = SpendTotals.of(whole.data[0].totals)
    if not grouping:
        return SpendReport(usage_filter.since, usage_filter.until, total, [SpendGroup({}, total)], truncated=False)
    found = await sum_usage(session, usage_filter, grouping)
    groups = [SpendGroup(one.group, SpendTotals.of(one.totals)) for one in found.data]
    return SpendReport(usage_filter.since, usage_filter.until, total, groups, truncated=found.truncated)


async def forecast_spend(session: AsyncSession, usage_filter: UsageFilter, now: datetime) -> SpendForecast:
    """Return the forecast of this month for the requests of the filter, whose time does not count."""
    since = read_since(now)
    by_scope = await spend_by_slot(session, replace(usage_filter, since=since, until=now), "day")
    days = by_scope.get(None, {})
    found = forecast_month(days, now)
    of_month = [DaySpend(day, cost) for day, cost in sorted(days.items()) if day >= found.start and cost]
    return SpendForecast.of(found, of_month)


async def spend_by_slot(
    session: AsyncSession, usage_filter: UsageFilter, slot: str, column: str | None = None
) -> dict[str | None, dict[datetime, int]]:
    """Return the cost of each `day` or `hour` by its start, for each id in the column (`tenant`, `project`, `key`).

    Without a column, all is under None.
    """
    grouping = (slot,) if column is None else (slot, column)
    source = await source_of(session, usage_filter, grouping)
    keys = [source.c[slot], *(() if column is None else (source.c[f"{column}_id"],))]
    cost = cast(func.sum(source.c.cost_nanodollars), BigInteger)
    found: defaultdict[str | None, dict[datetime, int]] = defaultdict(dict)
    for text, *ids, amount in await session.execute(select(*keys, cost).group_by(*keys)):
        at = datetime.fromisoformat(text)
        found[ids[0] if ids else None][at if at.tzinfo else at.replace(tzinfo=UTC)] = amount
    return dict(found)
