"""Tables of operational alerts. Times of conditions are Unix milliseconds of the database's clock."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum
from typing import Any

from sqlalchemy import JSON, BigInteger, CheckConstraint, Index, String
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable, UtcDateTime
from moiety_platform.tenants.models import ID_LENGTH

MAX_SUBJECT_LENGTH = 300
MAX_SUMMARY_LENGTH = 1000


class AlertType(StrEnum):
    """Types of the events of operational alerts. The part before the dot is the group of a webhook's events."""

    ENGINE_DOWN = "engine.down"
    ENGINE_UP = "engine.up"
    SLO_BURN_RATE = "slo.burn_rate"
    SLO_RECOVERED = "slo.recovered"
    DISK_NEARLY_FULL = "disk.nearly_full"
    DISK_RECOVERED = "disk.recovered"


class AlertSeverity(StrEnum):
    CRITICAL = "critical"
    WARNING = "warning"
    INFO = "info"


class ConditionState(StrEnum):
    PENDING = "pending"  # seen by a gateway, and not yet confirmed
    FIRING = "firing"  # reported


class OperationalAlert(DeploymentTable, Base):
    """One change of a condition: it fires, or it is resolved. `condition_id` is the same for both."""

    __tablename__ = "operational_alerts"
    __table_args__ = (
        CheckConstraint("status IN ('firing', 'resolved')", name="status_known"),
        Index(None, "at", "id"),
    )

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    condition_id: Mapped[str] = mapped_column(String(ID_LENGTH))
    type: Mapped[str] = mapped_column(String(32))
    status: Mapped[str] = mapped_column(String(16))
    severity: Mapped[str] = mapped_column(String(16))
    subject: Mapped[str] = mapped_column(String(MAX_SUBJECT_LENGTH))
    summary: Mapped[str] = mapped_column(String(MAX_SUMMARY_LENGTH))
    details: Mapped[dict[str, Any]] = mapped_column(JSON)
    at: Mapped[datetime] = mapped_column(UtcDateTime)


class AlertCondition(DeploymentTable, Base):
    """A condition that a gateway sees now; the row is deleted when the condition has ended.

    `since_ms` is when it was first seen, `seen_ms` when a gateway last confirmed it.
    """

    __tablename__ = "alert_conditions"
    __table_args__ = (CheckConstraint("state IN ('pending', 'firing')", name="state_known"),)

    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    subject: Mapped[str] = mapped_column(String(MAX_SUBJECT_LENGTH), primary_key=True)
    id: Mapped[str] = mapped_column(String(ID_LENGTH))
    state: Mapped[str] = mapped_column(String(16))
    since_ms: Mapped[int] = mapped_column(BigInteger)
    seen_ms: Mapped[int] = mapped_column(BigInteger)
