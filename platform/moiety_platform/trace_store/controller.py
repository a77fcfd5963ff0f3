"""`/admin/v1/traces`: maps HTTP to the queries. The admin router decides on access."""

from __future__ import annotations

from typing import Annotated

from litestar import Controller, get
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter

from moiety_platform.access.actions import needs
from moiety_platform.access.caller import Caller
from moiety_platform.access.views import READ_TRACES
from moiety_platform.db.paging import PageRequestDependency
from moiety_platform.db.session import Database
from moiety_platform.query_parameters import Filter, parse_text
from moiety_platform.time_span import TimeSpanDependency
from moiety_platform.trace_store.queries import TraceFilter, find_traces, parse_ms, read_trace, reading
from moiety_platform.trace_store.schemas import TraceDetail, TracePage

# attributes of the machines, and of the request that caused a preemption, which can be another tenant's
OPERATORS_ONLY = frozenset(
    {
        "moiety.engine", "moiety.engine.from", "moiety.engine.to", "moiety.beneficiary", "moiety.upstream.status",
        "moiety.upstream.message",
    }
)  # fmt: skip

_MS = {"type": "number", "minimum": 0}
Milliseconds = Annotated[str | None, QueryParameter(description="Duration in milliseconds.", schema_extra=_MS)]


class TraceController(Controller):
    """Routes of traces."""

    path = "/traces"
    tags = ("traces",)

    @get(opt=needs(READ_TRACES))
    async def list_traces(
        self,
        traces: NamedDependency[Database],
        page: PageRequestDependency,
        period: TimeSpanDependency,
        tenant_id: Filter = None,
        service_class: Filter = None,
        outcome: Filter = None,
        model: Filter = None,
        request_id: Filter = None,
        reason: Filter = None,
        min_ms: Milliseconds = None,
        max_ms: Milliseconds = None,
    ) -> TracePage:
        """List requests whose trace was kept, newest first; of the last 24 hours without `since` and `until`.

        `reason` is the scheduler's reason, an error's code, or the reason why the trace was kept; durations are at
        least `min_ms` and below `max_ms`.
        """
        given = {
            "tenant_id": tenant_id, "service_class": service_class, "outcome": outcome, "model": model,
            "request_id": request_id,
        }  # fmt: skip
        equal = {name: text for name, value in given.items() if (text := parse_text(value, name)) is not None}
        wanted = TraceFilter(
            period.since,
            period.until,
            equal,
            parse_text(reason, "reason"),
            parse_ms(min_ms, "min_ms"),
            parse_ms(max_ms, "max_ms"),
        )
        async with reading(traces) as session:
            return await find_traces(session, wanted, page)

    @get("/{trace_id:str}", opt=needs(READ_TRACES))
    async def get_trace(
        self, traces: NamedDependency[Database], caller: NamedDependency[Caller], trace_id: FromPath[str]
    ) -> TraceDetail:
        """Return all spans of a trace, by their start; for operators also the engine steps that it ran in."""
        hidden = OPERATORS_ONLY if caller.tenant_id is not None else ()
        async with reading(traces) as session:
            return await read_trace(session, trace_id, hidden)
