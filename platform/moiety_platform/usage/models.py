"""The tables of usage. No external keys, since what was used outlives what is deleted.

`usage` has one row a request, how it was and how it ended. `ledger` is what was billed: one entry that settles a
request, and one for each correction, never changed. `usage_hours` are sums, written with what they sum. Of every
request: its tokens and cost in `usage` are the sum of its entries; and every row of `usage_hours` is the sum of its
requests.

Rows of `usage` may be deleted when they are old; `usage_cuts` then has what they came to. So of every tenant and hour:
requests and cuts = ledger = hours. `usage_days` are sums of hours, made when a day is over and forgotten when its hours
change. `usage_minutes` are for looking at, proven by nothing, and gone after some hours.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, Double, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime


class UsageRecord(Base):
    """One authenticated request; the primary key makes recording idempotent."""

    __tablename__ = "usage"
    __table_args__ = (
        Index(None, "started_at", "request_id"),
        Index(None, "tenant_id", "started_at"),
        Index(None, "project_id", "started_at"),
        Index(None, "key_id", "started_at"),
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
    sla_attained: Mapped[bool | None]
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_used_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")


class EntryKind(StrEnum):
    SETTLED = "settled"  # the end of the request, as its gateway saw it; sequence 0
    METERED = "metered"  # what an engine counted of a request whose gateway died; the sequence is that of the answer
    CORRECTED = "corrected"  # what its gateway says after all, which was taken for dead
    FORESEEN = "foreseen"  # what was computed before anybody asked for it, which is no request; sequence 0


class LedgerEntry(Base):
    """What was billed of one request, once each kind and sequence. Only ever added."""

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


class _Sums:
    """Keys and sums of the next two; times in milliseconds are summed over the requests that have them, whose number
    stands beside."""

    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    project_id: Mapped[str] = mapped_column(Text, primary_key=True)
    key_id: Mapped[str] = mapped_column(Text, primary_key=True)
    model: Mapped[str] = mapped_column(Text, primary_key=True)
    service_class: Mapped[str] = mapped_column(Text, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    failed: Mapped[int] = mapped_column(BigInteger)
    rejected: Mapped[int] = mapped_column(BigInteger)
    disconnected: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    ttft_ms: Mapped[float] = mapped_column(Double)
    num_ttft: Mapped[int] = mapped_column(BigInteger)
    duration_ms: Mapped[float] = mapped_column(Double)
    preemptions: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)
    num_kept: Mapped[int] = mapped_column(BigInteger)  # promises
    num_promised: Mapped[int] = mapped_column(BigInteger)
    speculative_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")
    speculative_used_tokens: Mapped[int] = mapped_column(BigInteger, server_default="0")


class UsageHour(_Sums, Base):
    """Sums over the requests that started in one hour."""

    __tablename__ = "usage_hours"

    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True, sort_order=-1)


class UsageDay(_Sums, Base):
    """The sums of one day's hours, of a day that is done (`UsageDayMark`)."""

    __tablename__ = "usage_days"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True, sort_order=-1)


class UsageDayMark(Base):
    """A day that is long over: whether its hours are summed up, and nothing was added to them since."""

    __tablename__ = "usage_day_marks"

    day: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    is_done: Mapped[bool]


class UsageCut(Base):
    """What the deleted requests of a tenant that started in one hour had come to."""

    __tablename__ = "usage_cuts"

    hour: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    tenant_id: Mapped[str] = mapped_column(Text, primary_key=True)
    requests: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    cost_nanodollars: Mapped[int] = mapped_column(BigInteger)


class UsageMinute(Base):
    """Sums over the requests of a tenant and class that ended in one minute, as they were when they ended: what is
    corrected later stays as it was. `good_tokens` are the output tokens of requests whose promise was kept."""

    __tablename__ = "usage_minutes"

    minute: Mapped[int] = mapped_column(Integer, primary_key=True, autoincrement=False)  # since 1970
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
    num_kept: Mapped[int] = mapped_column(BigInteger)  # promises
    num_promised: Mapped[int] = mapped_column(BigInteger)
