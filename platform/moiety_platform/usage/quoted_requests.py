"""Requests that had a quote: predicted against actual times, met guarantees, credits and their reasons.

Percentiles need the single requests, so a report reads the newest of them, at most MAX_READ.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import datetime
from statistics import quantiles
from typing import Any

import msgspec
from sqlalchemy import Select, literal_column, select
from sqlalchemy.ext.asyncio import AsyncSession

from moiety_platform.usage.models import IS_QUOTED, UsageRecord
from moiety_platform.usage.queries import UsageFilter

MAX_READ = 5000


class TimeRatios(msgspec.Struct, frozen=True):
    """Percentiles of the actual time divided by the predicted time: 1 is exact, 2 means twice as long."""

    p10: float
    median: float
    p90: float


class QuotedClass(msgspec.Struct, frozen=True):
    """Requests with a quote in one class. Ratios are null where no request has both times."""

    service_class: str
    requests: int
    num_guarantees: int
    num_guarantees_met: int
    credit_nanodollars: int
    credit_reasons: dict[str, int]  # missed guarantees by reason
    ttft_ratio: TimeRatios | None
    duration_ratio: TimeRatios | None


class QuoteReport(msgspec.Struct, frozen=True):
    """Requests with a quote by class; `truncated` says that only the newest are counted."""

    since: datetime
    until: datetime
    data: list[QuotedClass]
    truncated: bool


async def report_quotes(session: AsyncSession, usage_filter: UsageFilter) -> QuoteReport:
    """Return the report of the requests that match the filter."""
    found = (await session.execute(quoted_requests(usage_filter, session.get_bind().dialect.name))).all()
    by_class: defaultdict[str, list[Any]] = defaultdict(list)
    for one in found[:MAX_READ]:
        by_class[one.service_class].append(one)
    data = [_summed(name, rows) for name, rows in sorted(by_class.items())]
    return QuoteReport(usage_filter.since, usage_filter.until, data, truncated=len(found) > MAX_READ)


def quoted_requests(usage_filter: UsageFilter, dialect: str) -> Select[*tuple[Any, ...]]:
    """Return the statement that reads the newest requests with a quote, one more than a report counts."""
    row = UsageRecord
    return (
        select(
            row.service_class,
            row.guarantee_met,
            row.credit_nanodollars,
            row.credit_reason,
            row.ttft_ms,
            row.predicted_ttft_ms,
            row.duration_ms,
            row.predicted_duration_ms,
        )
        .where(
            row.started_at >= usage_filter.since,
            row.started_at < usage_filter.until,
            literal_column(f"({IS_QUOTED})"),  # without a type, for the reason of UsageFilter.row_conditions
            *usage_filter.row_conditions(dialect),
        )
        .order_by(row.started_at.desc(), row.request_id.desc())
        .limit(MAX_READ + 1)
    )


def _summed(service_class: str, rows: Sequence[Any]) -> QuotedClass:
    return QuotedClass(
        service_class=service_class,
        requests=len(rows),
        num_guarantees=sum(row.guarantee_met is not None for row in rows),
        num_guarantees_met=sum(row.guarantee_met is True for row in rows),
        credit_nanodollars=sum(row.credit_nanodollars for row in rows),
        credit_reasons=dict(Counter(row.credit_reason for row in rows if row.credit_reason is not None)),
        ttft_ratio=_ratios([(row.ttft_ms, row.predicted_ttft_ms) for row in rows]),
        duration_ratio=_ratios([(row.duration_ms, row.predicted_duration_ms) for row in rows]),
    )


def _ratios(times: Sequence[tuple[float | None, float | None]]) -> TimeRatios | None:
    """Return percentiles over (actual, predicted) pairs, of which some may be incomplete."""
    ratios = [actual / predicted for actual, predicted in times if actual is not None and predicted]
    if not ratios:
        return None
    if len(ratios) == 1:
        return TimeRatios(ratios[0], ratios[0], ratios[0])
    tenths = quantiles(ratios, n=10, method="inclusive")
    return TimeRatios(tenths[0], tenths[4], tenths[8])
