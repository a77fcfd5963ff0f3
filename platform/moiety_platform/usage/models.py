"""Tables of usage. No foreign keys, because usage outlives the deleted tenants, projects and keys.

`usage` has one row per request: its properties and its outcome. `ledger` holds what was billed: one entry that settles
a request, and one for each correction and each credit, never changed. `usage_hours` are sums, written together with the
rows that they sum. For every request, its tokens and cost in `usage` are the sum of its entries; every row of
`usage_hours` is the sum of its requests.

Old rows of `usage` may be deleted; `usage_cuts` then has their sums. So for every tenant and hour: requests and cuts =
ledger = hours. `usage_days` are sums of hours, made when a day is over and deleted when its hours change.
`usage_minutes` are for display only, are not reconciled, and are deleted after some hours.

`usage_attributed_sums` are sums of requests by end user and tags, made from the rows some time later, for the spans of
`usage_attributed_spans`. They are exact as long as the span's hours have the sums with which it was made
(`attributed_spans.py`).
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Double, Index, Integer, String, Text, false, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, SharedTable, UtcDateTime, WideInteger

IS_ATTRIBUTED = "end_user IS NOT NULL OR tags IS NOT NULL"
"""Condition of the rows in the indexes of end users. A query must contain it for SQLite to use these indexes."""

IS_UNSUCCESSFUL = "http_status >= 400 OR error_code IS NOT NULL"
"""Condition of the rows in the indexes of unsuccessful requests, of which the same is true."""

IS_QUOTED = "guarantee_met IS NOT NULL OR predicted_ttft_ms IS NOT NULL"
"""Condition of the rows in the indexes of requests with a quote, of which the same is true."""


class UsageRecord(Base):
    """One authenticated request; the primary key makes recording idempotent.

    `end_user` and `tags` are what its client named (`attribution.py`); tags are a JSON object.
    """

    __tablename__ = "usage"
    __table_args__ = (
        Index(None, "started_at", "request_id"),
        Index(None, "tenant_id", "started_at"),
        Index(None, "project_id", "started_at"),
        Index(None, "key_id", "started_at"),
        *(
            Index(name, *columns, sqlite_where=text(IS_ATTRIBUTED), postgresql_where=text(IS_ATTRIBUTED))
            for name, columns in (
                ("ix_usage_end_user", ("tenant_id", "end_user", "started_at")),
                ("ix_usage_end_user_any_tenant", ("end_user", "started_at", "request_id")),
            )
        ),
        *(
            Index(name, *columns, sqlite_where=text(condition), postgresql_where=text(condition))
            for condition, index in ((IS_UNSUCCESSFUL, "ix_usage_unsuccessful"), (IS_QUOTED, "ix_usage_quoted"))
            for name, columns in (
                (index, ("started_at", "request_id")),
                (f"{index}_tenant", ("tenant_id", "started_at")),
            )
        ),
    )

    request_id: Mapped[str] = mapped_column(Text, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text)
    project_id: Mapped[str] = mapped_column(Text)
    key_id: Mapped[str] = mapped_column(Text)
    endpoint: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    service_class: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    outcome: Mapped[str] = mapped_column(Text)
    http_status: Mapped[int]
    num_choices: Mapped[int]
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    queue_ms: Mapped[float | None] = mapped_column(Double)
    ttft_ms: Mapped[float | None] = mapped_column(Double)
    duration_ms: Mapped[float] = mapped_column(Double)
    error_code: Mapped[str | None] = mapped_column(Text)
    num_preemptions: Mapped[int] = mapped_column(server_default="0")
    slo_attained: Mapped[bool | None]
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_used_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    expert_read_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    expert_moved_bytes: Mapped[int] = mapped_column(BigInteger, server_default="0")
    end_user: Mapped[str | None] = mapped_column(Text)
    tags: Mapped[str | None] = mapped_column(Text)
    guarantee_met: Mapped[bool | None]
    predicted_ttft_ms: Mapped[float | None] = mapped_column(Double)
    predicted_duration_ms: Mapped[float | None] = mapped_column(Double)
    credit_nanodollars: Mapped[int] = mapped_column(BigInteger, server_default="0")
    credit_reason: Mapped[str | None] = mapped_column(String(16))
    route: Mapped[str | None] = mapped_column(Text)
    trace_id: Mapped[str | None] = mapped_column(String(32))
    spot_percent: Mapped[int | None]


class EntryKind(StrEnum):
    SETTLED = "settled"  # the end of the request, as its gateway saw it; sequence 0
    METERED = "metered"  # an engine's count for a request whose gateway died; the sequence is that of the answer
    CORRECTED = "corrected"  # the final record of a gateway that was wrongly taken for dead
    SPECULATIVE = "speculative"  # speculative prefill, computed without a request; sequence 0
    CREDITED = "credited"  # a credit for a missed guarantee: a negative cost and no tokens; sequence 0


class LedgerEntry(Base):
    """Amounts billed for one request, once per kind and sequence. Append-only."""

    __tablename__ = "ledger"
    __table_args__ = (Index(None, "tenant_id", "started_at"),)

    request_id: Mapped[str] = mapped_column(Text, primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    sequence: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)
    tenant_id: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)  # of the request
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)


class _Counts:
    """Sums of requests that are whole numbers of 64 bits.

    Times in milliseconds are summed over the requests that have them; `num_*` counts those requests.
    """

    requests: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    rejected: Mapped[int] = mapped_column(BigInteger)
    disconnected: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    num_ttft: Mapped[int] = mapped_column(BigInteger)
    preemptions: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)
    num_slo_attained: Mapped[int] = mapped_column(BigInteger)  # requests that attained their SLO
    num_slo_requests: Mapped[int] = mapped_column(BigInteger)
    speculative_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_used_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    credit_nanodollars: Mapped[int] = mapped_column(BigInteger, server_default="0")  # already taken off the cost
    num_guarantees: Mapped[int] = mapped_column(BigInteger, server_default="0")  # of quotes, met or missed
    num_guarantees_met: Mapped[int] = mapped_column(BigInteger, server_default="0")


class _Amounts(_Counts):
    """All sums of requests."""

    ttft_ms: Mapped[float] = mapped_column(Double)
    duration_ms: Mapped[float] = mapped_column(Double)
    expert_read_bytes: Mapped[int] = mapped_column(WideInteger, server_default="0")
    expert_moved_bytes: Mapped[int] = mapped_column(WideInteger, server_default="0")


class _Sums(_Amounts):
    """Keys and sums of the next two tables."""

    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    key_id: Mapped[str] = mapped_column(Text, primary_key=True)
    model: Mapped[str] = mapped_column(Text, primary_key=True)
    service_class: Mapped[str] = mapped_column(Text, primary_key=True)


class UsageHour(_Sums, Base):
    """Sums over the requests that started in one hour."""

    __tablename__ = "usage_hours"

    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True, sort_order=-1)


class UsageDay(_Sums, Base):
    """Sums of one day's hours, for a day that is done (`UsageDayMark`)."""

    __tablename__ = "usage_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True, sort_order=-1)


class UsageDayMark(SharedTable, Base):
    """Mark of a past day: whether its hours are summed up, and nothing was added to them since.

    `is_attributed` says that since then the retention job has found sums by end user and tags for all of its tenants.
    """

    __tablename__ = "usage_day_marks"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    is_done: Mapped[bool]
    is_attributed: Mapped[bool] = mapped_column(server_default=false())


class AttributedSum(_Amounts, Base):
    """Sums of a tenant's requests with one end user and one set of tags, within the span that begins at `start`.

    `number` counts the groups of a span, those with most output tokens first. Bytes have two parts, whose sums fit into
    64 bits on SQLite (`wide_sums.py`).
    """

    __tablename__ = "usage_attributed_sums"
    __table_args__ = (Index(None, "start"),)

    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    start: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    number: Mapped[int] = mapped_column(BigInteger, primary_key=True, autoincrement=False)
    project_id: Mapped[str] = mapped_column(Text)
    key_id: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    service_class: Mapped[str] = mapped_column(Text)
    end_user: Mapped[str | None] = mapped_column(Text)
    tags: Mapped[str | None] = mapped_column(Text)
    expert_read_bytes_high: Mapped[int] = mapped_column(BigInteger, server_default="0")
    expert_moved_bytes_high: Mapped[int] = mapped_column(BigInteger, server_default="0")


class AttributedSpan(_Counts, Base):
    """Whole hours of one day, [start, until), of which a tenant's requests are in `usage_attributed_sums`.

    The counts are the sums of the tenant's hours when the span was made.
    """

    __tablename__ = "usage_attributed_spans"
    __table_args__ = (Index(None, "day"),)

    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    start: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    until: Mapped[datetime] = mapped_column(UtcDateTime)
    day: Mapped[datetime] = mapped_column(UtcDateTime)


class UsageCut(Base):
    """Sums of a tenant's deleted requests that started in one hour."""

    __tablename__ = "usage_cuts"

    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)
    credit_nanodollars: Mapped[int] = mapped_column(BigInteger, server_default="0")


class UsageMinute(Base):
    """Sums over the requests of a tenant and class that ended in one minute, as they were at their end.

    Later corrections do not change them. `good_tokens` are the output tokens of requests that attained their SLO.
    """

    __tablename__ = "usage_minutes"

    minute: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # minutes since 1970
    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    service_class: Mapped[str] = mapped_column(Text, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    rejected: Mapped[int] = mapped_column(BigInteger)
    disconnected: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    good_tokens: Mapped[int] = mapped_column(BigInteger)
    ttft_ms: Mapped[float] = mapped_column(Double)
    num_ttft: Mapped[int] = mapped_column(BigInteger)
    queue_ms: Mapped[float] = mapped_column(Double)
    num_queue: Mapped[int] = mapped_column(BigInteger)
    duration_ms: Mapped[float] = mapped_column(Double)
    preemptions: Mapped[int] = mapped_column(BigInteger)
    num_slo_attained: Mapped[int] = mapped_column(BigInteger)  # requests that attained their SLO
    num_slo_requests: Mapped[int] = mapped_column(BigInteger)
