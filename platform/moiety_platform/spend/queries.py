"""Queries of spend, over the same rows and sums as reports of usage. Within the caller's transaction."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import reduce

import msgspec
from sqlalchemy import BigInteger, ColumnElement, Subquery, cast, func, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.errors import BadRequest
from moiety_platform.spend.forecast import forecast_month, read_since
from moiety_platform.spend.schemas import DaySpend, SpendForecast, SpendGroup, SpendReport, SpendTotals
from moiety_platform.usage.group_names import find_names
from moiety_platform.usage.queries import (
    MAX_ATTRIBUTED_SPAN,
    MAX_GROUPS,
    UsageFilter,
    group_keys,
    group_order,
    is_by_attribution,
    reads_requests,
    source_of,
)

MAX_PARTS = 36  # of a report by end user or tag: about three years
MAX_MERGED_GROUPS = 5000  # of such a report, of which MAX_GROUPS are listed
_SUMS = tuple(name for name in SpendTotals.__struct_fields__ if name != "cost_before_credits_nanodollars")


async def report_spend(
    session: AsyncSession, usage_filter: UsageFilter, grouping: Sequence[str], max_groups: int | None = None
) -> SpendReport:
    """Return spend per group. Needs a stable snapshot, and raises BadRequest, both as `sum_usage` does.

    One statement returns the groups and the total, so that the usage is read once. Only the total of a report by end
    user or tag, which lists the requests whose rows are kept, comes from the sums of all requests.
    """
    max_groups = max_groups or MAX_GROUPS
    source = await source_of(session, usage_filter, grouping, _SUMS)
    since, until = usage_filter.since, usage_filter.until
    if not grouping:
        total = await _total(session, source)
        return SpendReport(since, until, total, [SpendGroup({}, total)], truncated=False)
    keys = group_keys(source, grouping)
    sums = [_sum(source.c[name]).label(name) for name in _SUMS]
    whole = [cast(func.sum(one.element).over(), BigInteger).label(f"all_{one.name}") for one in sums]
    groups = select(*keys, *sums, *whole).group_by(*keys).subquery()
    columns = list(groups.c)
    order = group_order(columns[: len(keys)], grouping, groups.c.output_tokens)
    is_counted = groups.c.requests + groups.c.speculative_tokens > 0  # as in reports of usage
    rows = (await session.execute(select(groups).where(is_counted).order_by(*order).limit(max_groups + 1))).all()
    if is_by_attribution(grouping):
        total = await _total(session, await source_of(session, usage_filter, (), _SUMS))
    else:
        total = _totals(rows[0][-len(_SUMS) :]) if rows else await _total(session, source)
    listed, end = rows[:max_groups], len(keys) + len(_SUMS)
    names = await find_names(session, grouping, listed)
    data = [SpendGroup(names.label_all(grouping, row), _totals(row[len(keys) : end])) for row in listed]
    return SpendReport(since, until, total, data, truncated=len(rows) > max_groups)


async def _total(session: AsyncSession, source: Subquery) -> SpendTotals:
    return _totals((await session.execute(select(*(_sum(source.c[name]) for name in _SUMS)))).one())


def _sum(column: ColumnElement[int]) -> ColumnElement[int]:
    return cast(func.coalesce(func.sum(column), 0), BigInteger)


def _totals(row: Sequence[int]) -> SpendTotals:
    sums = dict(zip(_SUMS, row, strict=True))
    before = sums["cost_nanodollars"] + sums["credit_nanodollars"]
    return SpendTotals(**sums, cost_before_credits_nanodollars=before)


def parts_of(usage_filter: UsageFilter, grouping: Sequence[str]) -> list[UsageFilter]:
    """Return the filter in parts of the time that one report may span, oldest first.

    Reports that read every request have several, each for a short transaction. Raises BadRequest for too many.
    """
    since, until = usage_filter.since, usage_filter.until
    if not reads_requests(usage_filter, grouping) or until - since <= MAX_ATTRIBUTED_SPAN:
        return [usage_filter]
    if until - since > MAX_PARTS * MAX_ATTRIBUTED_SPAN:
        days = (MAX_PARTS * MAX_ATTRIBUTED_SPAN).days
        raise BadRequest(f"Spend by end user or tag may span {days} days; ask for a shorter time.", param="since")
    starts = [since]
    while starts[-1] + MAX_ATTRIBUTED_SPAN < until:
        starts.append(starts[-1] + MAX_ATTRIBUTED_SPAN)
    return [
        replace(usage_filter, since=start, until=end) for start, end in zip(starts, [*starts[1:], until], strict=True)
    ]


class MergedSpend:
    """Sums of the parts of a report, which are added from the oldest to the newest."""

    def __init__(self, grouping: Sequence[str]) -> None:
        self._times = [name for name in ("hour", "day") if name in grouping]
        self._parts: list[SpendReport] = []  # without their groups
        self._totals: dict[tuple[str | None, ...], SpendTotals] = {}
        self._groups: dict[tuple[str | None, ...], dict[str, str | None]] = {}

    def add(self, part: SpendReport) -> None:
        """Add a part with all its groups. Raises BadRequest where a group of several parts could be incomplete."""
        totals = self._totals
        for one in part.data:
            key = tuple(one.group.values())
            if key in totals:
                totals[key] = totals[key].plus(one.totals)
            elif not self._times or len(totals) < MAX_MERGED_GROUPS:  # groups of later times are not listed
                self._groups[key], totals[key] = one.group, one.totals
        self._parts.append(msgspec.structs.replace(part, data=[]))
        if not self._times and (part.truncated or len(totals) > MAX_MERGED_GROUPS):
            days = MAX_ATTRIBUTED_SPAN.days
            raise BadRequest(
                f"More than {MAX_MERGED_GROUPS:,} groups cannot be summed up over more than {days} days; ask for a "
                "shorter time, or filter by a tenant, a project, a key or a model.",
                param="group_by",
            )

    def report(self) -> SpendReport:
        """Return the report of the whole time, in the order of `sum_usage`."""
        groups, totals = self._groups, self._totals

        def place(key: tuple[str | None, ...]) -> tuple[list[str], int, list[str]]:
            times = [groups[key][name] or "" for name in self._times]
            return times, -totals[key].output_tokens, [part or "" for part in key]

        listed = sorted(groups, key=place)
        return SpendReport(
            self._parts[0].since,
            self._parts[-1].until,
            reduce(SpendTotals.plus, (part.total for part in self._parts)),
            [SpendGroup(groups[key], totals[key]) for key in listed[:MAX_GROUPS]],
            truncated=len(listed) > MAX_GROUPS or any(part.truncated for part in self._parts),
        )


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
    source = await source_of(session, usage_filter, grouping, ("cost_nanodollars",))
    keys = [source.c[slot], *(() if column is None else (source.c[f"{column}_id"],))]
    cost = cast(func.sum(source.c.cost_nanodollars), BigInteger)
    found: defaultdict[str | None, dict[datetime, int]] = defaultdict(dict)
    for text, *ids, amount in await session.execute(select(*keys, cost).group_by(*keys)):
        at = datetime.fromisoformat(text)
        found[ids[0] if ids else None][at if at.tzinfo else at.replace(tzinfo=UTC)] = amount
    return dict(found)
