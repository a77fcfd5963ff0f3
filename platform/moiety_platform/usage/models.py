"""The table of usage rows: `UsageRow` as SQL. No foreign keys, since what was used outlives what is deleted."""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, Double, Index, Text
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
