"""Response schemas of the admin API for usage."""

from __future__ import annotations

from datetime import datetime
from typing import Self

import msgspec

from moiety_platform.db.paging import Page
from moiety_platform.usage.attribution import tags_of
from moiety_platform.usage.models import UsageRecord
from moiety_wire.shared_fields import copy_fields


class RequestSums(msgspec.Struct, frozen=True):
    """Sums over requests, by outcome, and of their tokens."""

    requests: int
    failed: int
    rejected: int
    disconnected: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int


class UsageTotals(RequestSums, frozen=True):
    """Sums over requests; means are null where no request has the figure."""

    mean_ttft_ms: float | None
    mean_duration_ms: float | None
    preemptions: int
    cost_nanodollars: int
    attainment: float | None  # share of the requests with an SLO that attained it; rejected ones did not
    speculative_tokens: int  # prefilled speculatively; not part of the prompt tokens
    speculative_used_tokens: int  # part of them that requests began with; more may be used later
    credit_nanodollars: int  # for missed guarantees of quotes; already taken off the cost
    num_guarantees: int  # of quotes, met or missed
    num_guarantees_met: int
    # Shares of the experts' weights that engines read, and that they loaded or moved between ranks, in bytes. Null for
    # an administrator of one tenant: the shares depend on the requests of others.
    expert_read_bytes: int | None
    expert_moved_bytes: int | None


class UsageGroup(msgspec.Struct, frozen=True):
    """One group's sums. `group` holds e.g. `tenant_id` and `tenant_name`, `model`, or `hour`."""

    group: dict[str, str | None]
    totals: UsageTotals


class UsageReport(msgspec.Struct, frozen=True):
    """Sums over a time span; `truncated` says that there are more groups than are listed."""

    since: datetime
    until: datetime
    data: list[UsageGroup]
    truncated: bool


def without_expert_bytes(report: UsageReport) -> UsageReport:
    """Return the report for an administrator of one tenant, without figures that depend on other tenants."""
    hidden = {"expert_read_bytes": None, "expert_moved_bytes": None}
    replace = msgspec.structs.replace
    return replace(report, data=[replace(one, totals=replace(one.totals, **hidden)) for one in report.data])


class RequestView(msgspec.Struct, frozen=True):
    """One request as the API shows it."""

    request_id: str
    tenant_id: str
    project_id: str
    key_id: str
    endpoint: str
    model: str
    service_class: str
    started_at: datetime
    outcome: str
    http_status: int
    num_choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    queue_ms: float | None
    ttft_ms: float | None
    duration_ms: float
    error_code: str | None
    num_preemptions: int
    slo_attained: bool | None
    cost_nanodollars: int
    speculative_used_tokens: int
    expert_read_bytes: int | None  # as in UsageTotals
    expert_moved_bytes: int | None
    end_user: str | None  # that its client named
    tags: dict[str, str]  # that its client gave
    guarantee_met: bool | None  # of its quote; null: no guarantee, or it does not apply
    predicted_ttft_ms: float | None  # by its quote
    predicted_duration_ms: float | None  # by its quote, for its actual output tokens
    credit_nanodollars: int  # for a missed guarantee; already taken off the cost
    credit_reason: str | None  # ttft, finish or failed
    route: str | None  # the name that its client sent, where it is a route
    spot_percent: int | None  # of the class's price that it paid, in a spot class
    trace_id: str | None  # of its trace, which may not have been kept; null where no traces are recorded

    @classmethod
    def of(cls, record: UsageRecord) -> RequestView:
        return copy_fields(record, cls, tags=tags_of(record.tags))

    def without_expert_bytes(self) -> Self:
        """Return the request for an administrator of one tenant, without figures that depend on other tenants."""
        return msgspec.structs.replace(self, expert_read_bytes=None, expert_moved_bytes=None)


class RequestPage(Page[RequestView], frozen=True):
    """A page of requests, newest first; `next_cursor` is null on the last page."""

    def without_expert_bytes(self) -> RequestPage:
        """Return the page for an administrator of one tenant, without figures that depend on other tenants."""
        return msgspec.structs.replace(self, data=[one.without_expert_bytes() for one in self.data])
