"""Request and response bodies of the admin API for webhooks."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

import msgspec

from moiety_platform.openapi.schemas import shows
from moiety_platform.webhooks.models import MAX_URL_LENGTH, Webhook
from moiety_wire.shared_fields import copy_fields


class NewWebhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A destination of events to create."""

    url: Annotated[str, shows(maxLength=MAX_URL_LENGTH, pattern="^https?://[!-~]+$")]


class WebhookView(msgspec.Struct, frozen=True):
    """A webhook and the state of its deliveries.

    `pending` and `dead` count events that wait and events given up in the last 30 days; the others are the times of the
    last success and the last failure, and the cause of that failure.
    """

    id: str
    url: str
    created_at: datetime
    pending: int
    dead: int
    delivered_at: datetime | None
    failed_at: datetime | None
    last_error: str | None

    @classmethod
    def of(cls, webhook: Webhook, pending: int, dead: int) -> WebhookView:
        delivered_at, failed_at = _moment(webhook.delivered_ms), _moment(webhook.failed_ms)
        return copy_fields(webhook, cls, pending=pending, dead=dead, delivered_at=delivered_at, failed_at=failed_at)


class WebhookViews(msgspec.Struct, frozen=True):
    """All webhooks, oldest first."""

    data: list[WebhookView]


class CreatedWebhook(msgspec.Struct, frozen=True):
    """A new webhook with its `secret`, which is shown only once."""

    webhook: WebhookView
    secret: str


def _moment(unix_ms: int | None) -> datetime | None:
    return None if unix_ms is None else datetime.fromtimestamp(unix_ms / 1000, UTC)
