"""Tables of quotas and rate limits. Amounts are integers of the limit's unit.

Granted and settled amounts outlive their limit. For every window: settled ≤ granted, granted = Σ leases' granted,
settled = Σ leases' settled; for every lease: settled ≤ granted. `granted` does not grow past a cap.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, Index, String, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, UtcDateTime
from moiety_platform.tenants.models import ID_LENGTH

REPLICA_ID_LENGTH = 64


class LeaseState(StrEnum):
    LIVE = "live"  # its replica renews it
    QUARANTINED = "quarantined"  # it expired: its unsettled part counts as spent until it is proven unspent


class Quota(Base):
    """One limit of one scope."""

    __tablename__ = "quotas"
    __table_args__ = (
        UniqueConstraint("level", "scope_id", "kind"),
        CheckConstraint("cap >= 0", name="cap_not_negative"),
        CheckConstraint("level IN ('tenant', 'project', 'key')", name="level_known"),
        Index(None, "created_at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    level: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    kind: Mapped[str] = mapped_column(String(32))
    cap: Mapped[int] = mapped_column(BigInteger)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


class QuotaWindow(Base):
    """Granted and settled amounts of one limit in one window.

    A limit on open requests has one window, which began in 1970, and nothing in it is ever settled.
    """

    __tablename__ = "quota_windows"
    __table_args__ = (CheckConstraint("settled <= granted", name="settled_within_granted"), Index(None, "start"))

    quota_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    start: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    granted: Mapped[int] = mapped_column(BigInteger)
    settled: Mapped[int] = mapped_column(BigInteger)


class QuotaThreshold(Base):
    """Threshold of a limit's cap, in percent, for an alert. For stocks only."""

    __tablename__ = "quota_thresholds"
    __table_args__ = (CheckConstraint("percent BETWEEN 1 AND 100", name="percent_in_range"),)

    quota_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    percent: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class QuotaAlert(Base):
    """Alert that a window's use has passed a threshold; one row each.

    The gateway that sees it first enters it, with the values of that time. It outlives the limit. `tenant_id` is null
    if the limit is on a key of no tenant.
    """

    __tablename__ = "quota_alerts"
    __table_args__ = (Index(None, "id", unique=True), Index(None, "start"))

    quota_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    start: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    percent: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)
    id: Mapped[str] = mapped_column(String(ID_LENGTH))
    tenant_id: Mapped[str | None] = mapped_column(String(ID_LENGTH))
    level: Mapped[str] = mapped_column(String(16))
    scope_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    kind: Mapped[str] = mapped_column(String(32))
    cap: Mapped[int] = mapped_column(BigInteger)
    used: Mapped[int] = mapped_column(BigInteger)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class QuotaRate(Base):
    """Bucket of one rate: its debt (see `bucket.py`) at a time of the database's clock, in Unix milliseconds."""

    __tablename__ = "quota_rates"

    quota_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    debt: Mapped[int] = mapped_column(BigInteger)
    at_ms: Mapped[int] = mapped_column(BigInteger)


class QuotaLease(Base):
    """One gateway process's part of a window. `expires_ms` is by the database's clock, in Unix milliseconds."""

    __tablename__ = "quota_leases"
    __table_args__ = (
        CheckConstraint("settled <= granted", name="settled_within_granted"),
        CheckConstraint("state IN ('live', 'quarantined')", name="state_known"),
        Index(None, "replica_id"),
        Index(None, "state", "expires_ms"),
    )

    quota_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    start: Mapped[datetime] = mapped_column(UtcDateTime, primary_key=True)
    replica_id: Mapped[str] = mapped_column(String(REPLICA_ID_LENGTH), primary_key=True)
    granted: Mapped[int] = mapped_column(BigInteger)
    settled: Mapped[int] = mapped_column(BigInteger)
    expires_ms: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str] = mapped_column(String(16))
