"""Tables of webhooks. Times are Unix milliseconds of the database's clock."""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from sqlalchemy import BigInteger, CheckConstraint, Index, String, text
from sqlalchemy.orm import Mapped, mapped_column

from moiety_platform.db.base import Base, DeploymentTable, UtcDateTime
from moiety_platform.tenants.models import ID_LENGTH
from moiety_platform.webhooks.terms import EventGroup

MAX_URL_LENGTH = 1000
MAX_ERROR_LENGTH = 64
MAX_ROUTING_KEY_LENGTH = 64
MAX_EVENTS_LENGTH = 200


class DeliveryState(StrEnum):
    PENDING = "pending"  # to be sent, or being sent
    DEAD = "dead"  # given up


class Webhook(DeploymentTable, Base):
    """Destination of events. Its secret is not stored: it follows from its id and the deployment's pepper.

    `routing_key` is the integration key of PagerDuty. `events` are the groups of events that it gets, separated by
    commas; null: all groups.
    """

    __tablename__ = "webhooks"

    id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    url: Mapped[str] = mapped_column(String(MAX_URL_LENGTH))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    delivered_ms: Mapped[int | None] = mapped_column(BigInteger)  # time of the last success
    failed_ms: Mapped[int | None] = mapped_column(BigInteger)  # time of the last failure
    last_error: Mapped[str | None] = mapped_column(String(MAX_ERROR_LENGTH))  # of the last failure
    format: Mapped[str] = mapped_column(String(16), server_default=text("'json'"))
    routing_key: Mapped[str | None] = mapped_column(String(MAX_ROUTING_KEY_LENGTH))
    events: Mapped[str | None] = mapped_column(String(MAX_EVENTS_LENGTH))

    @property
    def groups(self) -> list[EventGroup]:
        """Groups of events that the webhook gets."""
        return list(EventGroup) if self.events is None else [EventGroup(name) for name in self.events.split(",")]


class WebhookDelivery(DeploymentTable, Base):
    """One event for one webhook, deleted on success.

    `available_ms` is the end of a lease or of a pause: until then no other gateway takes the row.
    """

    __tablename__ = "webhook_deliveries"
    __table_args__ = (
        CheckConstraint("state IN ('pending', 'dead')", name="state_known"),
        Index(None, "state", "available_ms"),
    )

    webhook_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    alert_id: Mapped[str] = mapped_column(String(ID_LENGTH), primary_key=True)
    state: Mapped[str] = mapped_column(String(16))
    num_tries: Mapped[int]
    available_ms: Mapped[int] = mapped_column(BigInteger)
