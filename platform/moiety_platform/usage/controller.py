"""Endpoints of /admin/v1/usage. Maps HTTP to the queries; the router authorizes the caller."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import datetime, timedelta
from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency, Provide
from litestar.params import QueryParameter, SkipValidation

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_USAGE, RECONCILE_USAGE
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.errors import BadRequest
from moiety_platform.openapi.tags_header import TAG_NAME, TAG_PATTERN
from moiety_platform.query_parameters import Filter, Since, Until, parse_text, parse_whole, some_of, whole
from moiety_platform.time_span import TimeSpanDependency, parse_time_span
from moiety_platform.usage.attribution import parse_tag
from moiety_platform.usage.minutes import GROUPINGS as MINUTE_GROUPINGS
from moiety_platform.usage.minutes import KEPT_HOURS, MAX_STEP, MinuteReport, parse_groups, sum_minutes
from moiety_platform.usage.quarantined_rows import EMPTY_QUARANTINE_REPORT, QuarantinedUsage
from moiety_platform.usage.queries import GROUPINGS, TAG_PREFIX, UsageFilter, list_requests, parse_grouping, sum_usage
from moiety_platform.usage.quoted_requests import QuoteReport, report_quotes
from moiety_platform.usage.reconciliation import Reconciliation, reconcile, take_snapshot_locks
from moiety_platform.usage.schemas import RequestPage, UsageReport, without_expert_bytes

Groups = Annotated[
    str | None,
    some_of(
        f"Groupings of the sums, separated by commas; one total by default. {TAG_PREFIX}NAME groups by a tag's values.",
        GROUPINGS,
        pattern=f"^{TAG_PREFIX}{TAG_NAME}$",
    ),
]
TagFilter = Annotated[
    str | None,
    QueryParameter(description="A tag, as NAME=VALUE.", schema_extra={"pattern": TAG_PATTERN, "format": "printable"}),
]
MinuteGroups = Annotated[
    str | None, some_of("Groupings of the sums, separated by commas; one total by default.", MINUTE_GROUPINGS)
]
Step = Annotated[str | None, whole("Minutes per sum; default 1.", 1, MAX_STEP)]
HOUR = timedelta(hours=1)

UsageFilterDependency = NamedDependency[SkipValidation[UsageFilter]]


def parse_filter(
    period: TimeSpanDependency,
    tenant_id: Filter = None,
    project_id: Filter = None,
    key_id: Filter = None,
    model: Filter = None,
    service_class: Filter = None,
    end_user: Filter = None,
    tag: TagFilter = None,
) -> UsageFilter:
    """Return the filter that a client's query parameters request. Raises BadRequest."""
    return UsageFilter(
        period.since,
        period.until,
        tenant_id=parse_text(tenant_id, "tenant_id"),
        project_id=parse_text(project_id, "project_id"),
        key_id=parse_text(key_id, "key_id"),
        model=parse_text(model, "model"),
        service_class=parse_text(service_class, "service_class"),
        end_user=parse_text(end_user, "end_user"),
        tag=None if tag is None else parse_tag(tag, "tag"),
    )


class UsageController(Controller):
    """Usage of tenants, projects, keys and models."""

    path = "/usage"
    tags = ("usage",)
    dependencies = {"usage_filter": Provide(parse_filter, sync_to_thread=False)}  # noqa: RUF012  read by the framework only

    @get(opt=needs(READ_USAGE))
    async def sum_usage(
        self,
        database: NamedDependency[Database],
        caller: NamedDependency[Caller],
        usage_filter: UsageFilterDependency,
        group_by: Groups = None,
    ) -> UsageReport:
        """Sum usage by tenant, project, key, model, service_class, hour, day, end_user, tag:NAME, in any combination.

        The last 24 hours unless `since` or `until` is given. Sums by end user or tag span 31 days at most, and contain
        the requests whose rows are kept.
        """
        grouping = parse_grouping(group_by)
        async with database.read() as session:
            await take_snapshot_locks(session)
            report = await sum_usage(session, usage_filter, grouping)
        return report if caller.tenant_id is None else without_expert_bytes(report)

    @get("/minutes", opt=needs(READ_USAGE))
    async def sum_minutes(
        self,
        database: NamedDependency[Database],
        now: NamedDependency[datetime],
        group_by: MinuteGroups = None,
        step: Step = None,
        since: Since = None,
        until: Until = None,
        tenant_id: Filter = None,
        service_class: Filter = None,
    ) -> MinuteReport:
        """Sum the requests that ended in the last hour, or since `since`, by the minute.

        Minutes are kept for six hours, and the response's `since` is no earlier.
        """
        grouping = parse_groups(group_by)
        size = 1 if step is None else parse_whole(step, "step")
        if not 1 <= size <= MAX_STEP:
            raise BadRequest(f"'step' must be from 1 to {MAX_STEP} minutes, not {size}.", param="step")
        period = parse_time_span(now, since or (now - HOUR).isoformat(), until)
        usage_filter = UsageFilter(
            max(period.since, now - timedelta(hours=KEPT_HOURS)),
            period.until,
            tenant_id=parse_text(tenant_id, "tenant_id"),
            service_class=parse_text(service_class, "service_class"),
        )
        async with database.read() as session:
            return await sum_minutes(session, usage_filter, grouping, size)

    @get("/requests", opt=needs(READ_USAGE))
    async def list_requests(
        self,
        database: NamedDependency[Database],
        caller: NamedDependency[Caller],
        page: PageRequestDependency,
        usage_filter: UsageFilterDependency,
        outcome: Filter = None,
    ) -> RequestPage:
        """List single requests, newest first."""
        of_outcome = replace(usage_filter, outcome=parse_text(outcome, "outcome"))
        async with database.read() as session:
            found = await list_requests(session, of_outcome, page)
        return found if caller.tenant_id is None else found.without_expert_bytes()

    @get("/quotes", opt=needs(READ_USAGE))
    async def report_quotes(
        self, database: NamedDependency[Database], usage_filter: UsageFilterDependency
    ) -> QuoteReport:
        """Compare predicted with actual times of requests that had a quote, by class; their guarantees and credits.

        The last 24 hours unless `since` or `until` is given. At most the newest 5,000 of these requests are counted.
        """
        async with database.read() as session:
            return await report_quotes(session, usage_filter)

    @get("/reconciliation", opt=needs(RECONCILE_USAGE))
    async def reconcile(
        self,
        database: NamedDependency[Database],
        period: TimeSpanDependency,
        quarantined_usage: NamedDependency[SkipValidation[QuarantinedUsage | None]],
    ) -> Reconciliation:
        """Compare requests, ledger, sums and limits of these hours; the last 24 by default.

        All quarantined usage of this gateway counts, whatever its time.
        """
        unbilled = EMPTY_QUARANTINE_REPORT
        if quarantined_usage is not None:
            unbilled = await asyncio.to_thread(quarantined_usage.report)
        async with database.read() as session:
            await take_snapshot_locks(session)
            return await reconcile(session, period.since, period.until, unbilled)
