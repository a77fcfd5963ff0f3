"""Endpoints of /admin/v1/spend. Maps HTTP to the queries; the router authorizes the caller."""

from __future__ import annotations

from datetime import datetime

from litestar import Controller, get
from litestar.di import NamedDependency, Provide

from moiety_platform.access.actions import needs
from moiety_platform.access.views import READ_USAGE
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.query_parameters import Filter, parse_text
from moiety_platform.spend.budgets import list_budgets
from moiety_platform.spend.queries import MAX_MERGED_GROUPS, MergedSpend, forecast_spend, parts_of, report_spend
from moiety_platform.spend.schemas import BudgetPage, SpendForecast, SpendReport
from moiety_platform.time_span import TimeSpan
from moiety_platform.usage.controller import Groups, UsageFilterDependency, parse_filter
from moiety_platform.usage.queries import parse_grouping
from moiety_platform.usage.reconciliation import take_snapshot_locks


def no_time(now: NamedDependency[datetime]) -> TimeSpan:
    """Return an empty period, for a route that takes no times from clients."""
    return TimeSpan(now, now)


class SpendController(Controller):
    """Spend of tenants, projects, keys, models, classes, end users and tags."""

    path = "/spend"
    tags = ("spend",)
    dependencies = {"usage_filter": Provide(parse_filter, sync_to_thread=False)}  # noqa: RUF012  read by the framework only

    @get(opt=needs(READ_USAGE))
    async def report_spend(
        self, database: NamedDependency[Database], usage_filter: UsageFilterDependency, group_by: Groups = None
    ) -> SpendReport:
        """Sum spend by tenant, project, key, model, service_class, hour, day, end_user and tag:NAME.

        The last 24 hours unless `since` or `until` is given. The figures are those of `/usage` and of the ledger. Sums
        by end user or tag span 1,116 days at most, and contain the requests whose rows are kept.
        """
        grouping = parse_grouping(group_by)
        parts, merged = parts_of(usage_filter, grouping), MergedSpend(grouping)
        for part in parts:
            async with database.read() as session:
                await take_snapshot_locks(session)
                if len(parts) == 1:
                    return await report_spend(session, part, grouping)
                merged.add(await report_spend(session, part, grouping, MAX_MERGED_GROUPS))
        return merged.report()

    @get("/forecast", opt=needs(READ_USAGE), dependencies={"period": Provide(no_time, sync_to_thread=False)})
    async def forecast_spend(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        usage_filter: UsageFilterDependency,
    ) -> SpendForecast:
        """Forecast the spend of this month, in UTC: what is spent, plus the mean of the last days for the rest of it.

        The mean is of the last seven days and of today so far, or since the first day with spend in four weeks if that
        is later.
        """
        async with database.read() as session:
            await take_snapshot_locks(session)
            return await forecast_spend(session, usage_filter, now)

    @get("/budgets", opt=needs(READ_USAGE))
    async def list_budgets(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        page: PageRequestDependency,
        tenant_id: Filter = None,
    ) -> BudgetPage:
        """List limits on money with their burn-down, oldest first; with `tenant_id`, those of one tenant."""
        async with database.read() as session:
            await take_snapshot_locks(session)
            return await list_budgets(session, page, now, parse_text(tenant_id, "tenant_id"))
