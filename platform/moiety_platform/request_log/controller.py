"""Endpoints of /admin/v1/requests. Maps HTTP to the queries; the router authorizes the caller."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency, Provide
from litestar.params import FromPath, QueryParameter

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_USAGE
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.openapi.described import fails
from moiety_platform.query_parameters import Filter, Since, one_of, parse_text
from moiety_platform.request_log.queries import (
    SLO_STATES,
    RequestSearch,
    parse_slo,
    parse_status,
    read_request,
    search_requests,
)
from moiety_platform.request_log.schemas import LoggedRequest, LoggedRequestPage
from moiety_platform.trace_store.controller import Milliseconds
from moiety_platform.trace_store.queries import parse_ms
from moiety_platform.usage.controller import UsageFilterDependency, parse_filter

Status = Annotated[
    str | None,
    QueryParameter(
        description="An HTTP status such as 429, or a class of them such as 4xx.",
        schema_extra={"pattern": "^[1-5]([0-9]{2}|[xX]{2})$"},
    ),
]
Slo = Annotated[str | None, one_of("Whether the request attained its SLO; none: no SLO applies.", *SLO_STATES)]
EARLIEST = datetime(1970, 1, 1, tzinfo=UTC)


class RequestLogController(Controller):
    """The log of all authenticated requests."""

    path = "/requests"
    tags = ("requests",)

    @get(opt=needs(READ_USAGE), dependencies={"usage_filter": Provide(parse_filter, sync_to_thread=False)})
    async def search_requests(
        self,
        database: NamedDependency[Database],
        traces: NamedDependency[Database],
        caller: NamedDependency[Caller],
        page: PageRequestDependency,
        usage_filter: UsageFilterDependency,
        since: Since = None,
        outcome: Filter = None,
        request_id: Filter = None,
        status: Status = None,
        error_code: Filter = None,
        route: Filter = None,
        slo: Slo = None,
        min_ms: Milliseconds = None,
    ) -> LoggedRequestPage:
        """Search the log of all requests, newest first; of the last 24 hours without `since` and `until`.

        A search by `request_id` alone is for any time. A request is in the log a moment after its end.
        """
        wanted = replace(usage_filter, outcome=parse_text(outcome, "outcome"))
        if request_id is not None and since is None:
            wanted = replace(wanted, since=EARLIEST)
        search = RequestSearch(
            usage=wanted,
            request_id=parse_text(request_id, "request_id"),
            status=parse_status(status),
            error_code=parse_text(error_code, "error_code"),
            route=parse_text(route, "route"),
            slo=parse_slo(slo),
            min_ms=parse_ms(min_ms, "min_ms"),
        )
        found = await search_requests(database, traces, search, page)
        return found if caller.tenant_id is None else found.without_expert_bytes()

    @get("/{request_id:str}", opt=needs(READ_USAGE) | fails(404))
    async def get_request(
        self,
        database: NamedDependency[Database],
        traces: NamedDependency[Database],
        caller: NamedDependency[Caller],
        request_id: FromPath[str],
    ) -> LoggedRequest:
        """Return one request, whatever its time."""
        found = await read_request(database, traces, request_id)
        return found if caller.tenant_id is None else found.without_expert_bytes()
