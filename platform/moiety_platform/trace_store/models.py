"""Tables of traces. No foreign keys: spans arrive in any order and from several processes.

`traces` has a row for each request whose trace was kept, with its search fields; `spans` has all spans, of all senders.
They may be in another database than the other tables, so nothing joins them; a request's usage row has the same
`request_id`.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, Double, Index, SmallInteger, String, Text, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime

UNSUCCESSFUL = ("failed", "rejected", "disconnected")
"""Outcomes of requests that did not succeed."""

IS_UNSUCCESSFUL = f"outcome IN {UNSUCCESSFUL}"
"""Condition of the rows in the index of unsuccessful requests. A query must contain it for SQLite to use that index."""


class TraceRecord(Base):
    """One request whose trace was kept. Requests within one client's trace share the `trace_id`."""

    __tablename__ = "traces"
    __table_args__ = (  # the filter columns are in the index, so that a search reads only the rows that it returns
        Index("ix_traces_started_at", "started_at", "span_id", "service_class", "outcome", "duration_ms"),
        Index(
            "ix_traces_unsuccessful",
            "outcome",
            "started_at",
            "span_id",
            "service_class",
            "duration_ms",
            sqlite_where=text(IS_UNSUCCESSFUL),
            postgresql_where=text(IS_UNSUCCESSFUL),
        ),
        Index("ix_traces_tenant_id", "tenant_id", "started_at", "span_id", "service_class", "outcome", "duration_ms"),
        Index(None, "request_id"),
        Index(None, "stored_ms"),
    )

    trace_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    span_id: Mapped[str] = mapped_column(String(16), primary_key=True)  # of the request's root span
    request_id: Mapped[str] = mapped_column(Text)
    tenant_id: Mapped[str] = mapped_column(Text)
    service_class: Mapped[str] = mapped_column(Text)
    operation: Mapped[str] = mapped_column(Text)
    model: Mapped[str] = mapped_column(Text)
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    duration_ms: Mapped[float] = mapped_column(Double)
    outcome: Mapped[str] = mapped_column(Text)
    reason: Mapped[str | None] = mapped_column(Text)  # the scheduler's reason
    error_code: Mapped[str | None] = mapped_column(Text)
    kept_for: Mapped[str] = mapped_column(Text)
    stored_ms: Mapped[int] = mapped_column(BigInteger)  # Unix milliseconds by the clock of the process that stored it


class SpanRecord(Base):
    """One span as received; `attributes` use OpenTelemetry's names."""

    __tablename__ = "spans"
    __table_args__ = (Index(None, "tenant_id"), Index(None, "stored_ms"))

    trace_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    span_id: Mapped[str] = mapped_column(String(16), primary_key=True)
    parent_id: Mapped[str | None] = mapped_column(String(16))
    name: Mapped[str] = mapped_column(Text)
    kind: Mapped[int] = mapped_column(SmallInteger)
    service: Mapped[str] = mapped_column(Text)  # name of the sending process
    tenant_id: Mapped[str] = mapped_column(Text)  # "" where no gateway has set it
    start_ns: Mapped[int] = mapped_column(BigInteger)
    end_ns: Mapped[int] = mapped_column(BigInteger)
    status: Mapped[int] = mapped_column(SmallInteger)  # 0 unset, 1 ok, 2 error
    status_message: Mapped[str] = mapped_column(Text)
    attributes: Mapped[dict[str, Any]] = mapped_column(JSON)
    events: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    links: Mapped[list[dict[str, Any]]] = mapped_column(JSON)
    stored_ms: Mapped[int] = mapped_column(BigInteger)
