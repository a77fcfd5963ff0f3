"""Tables of agent runs and of their requests.

For every run: `used_*` are the sums of its ended requests. A budget holds because each open request has a reservation:
used and reserved amounts together never exceed it.
"""

from __future__ import annotations

from datetime import datetime

from sqlalchemy import BigInteger, CheckConstraint, Double, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.agent_runs.terms import MAX_NAME_CHARS
from moiety_platform.db.base import Base, UtcDateTime
from moiety_platform.prices.models import MAX_MODEL_LENGTH
from moiety_platform.tenants.models import ID_LENGTH

MAX_REQUEST_ID_LENGTH = 64


class AgentRun(Base):
    """One run of a tenant. Money is in nano-dollars."""

    __tablename__ = "agent_runs"
    __table_args__ = (
        UniqueConstraint("tenant_id", "name"),
        CheckConstraint("status IN ('active', 'stopped')", name="status_known"),
        Index(None, "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    name: Mapped[str] = mapped_column(String(MAX_NAME_CHARS))
    status: Mapped[str] = mapped_column(String(16))
    budget_nano: Mapped[int | None] = mapped_column(BigInteger)
    budget_tokens: Mapped[int | None] = mapped_column(BigInteger)
    deadline_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    deadline_s: Mapped[int | None]
    keep_s: Mapped[int | None]
    used_nano: Mapped[int] = mapped_column(BigInteger)
    used_tokens: Mapped[int] = mapped_column(BigInteger)
    num_requests: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    stopped_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AgentRunRequest(Base):
    """One request of a run. While it is open, `tokens` and `nano` are its reservation, then what it has used."""

    __tablename__ = "agent_run_requests"
    __table_args__ = (Index(None, "tenant_id"), Index(None, "run_id", "started_at"))

    run_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    request_id: Mapped[str] = mapped_column(String(MAX_REQUEST_ID_LENGTH), primary_key=True)
    tenant_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    trace_id: Mapped[str] = mapped_column(String(32))
    endpoint: Mapped[str] = mapped_column(String(64))
    model: Mapped[str] = mapped_column(String(MAX_MODEL_LENGTH))
    started_at: Mapped[datetime] = mapped_column(UtcDateTime)
    ended_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    outcome: Mapped[str] = mapped_column(String(16))  # "open" until it has ended
    error_code: Mapped[str | None] = mapped_column(String(64))
    tokens: Mapped[int] = mapped_column(BigInteger)
    nano: Mapped[int] = mapped_column(BigInteger)
    prompt_tokens: Mapped[int] = mapped_column(BigInteger)
    cached_tokens: Mapped[int] = mapped_column(BigInteger)
    output_tokens: Mapped[int] = mapped_column(BigInteger)
    duration_ms: Mapped[float | None] = mapped_column(Double)
