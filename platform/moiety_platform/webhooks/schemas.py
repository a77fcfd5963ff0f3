"""Request and response bodies of the admin API for webhooks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, ClassVar

import msgspec

from moiety_platform.openapi.schemas import shows
from moiety_platform.webhooks.models import MAX_ROUTING_KEY_LENGTH, MAX_URL_LENGTH, Webhook
from moiety_platform.webhooks.terms import HINT_LENGTH, EventGroup, WebhookFormat, hash_routing_key
from moiety_wire.shared_fields import copy_fields

ROUTING_KEY = re.compile(rf"[A-Za-z0-9]{{16,{MAX_ROUTING_KEY_LENGTH}}}", re.ASCII)
_OF_PAGERDUTY = WebhookFormat.PAGERDUTY.value
_OTHERS = [one.value for one in WebhookFormat if one is not WebhookFormat.PAGERDUTY]


class NewWebhook(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A destination of events to create.

    `routing_key` is the integration key of the format `pagerduty`, which needs one. `events` are the groups of events
    that it gets, all if not given.
    """

    rules: ClassVar[Sequence[Mapping[str, Any]]] = (
        {
            "anyOf": [
                {
                    "required": ["format", "routing_key"],
                    "properties": {"format": {"enum": [_OF_PAGERDUTY]}, "routing_key": {"type": "string"}},
                },
                {"properties": {"format": {"enum": _OTHERS}, "routing_key": {"type": "null"}}},
            ]
        },
    )

    url: Annotated[str, shows(maxLength=MAX_URL_LENGTH, pattern="^https?://[!-~]+$")]
    format: Annotated[str, shows(enum=list(WebhookFormat))] = WebhookFormat.JSON.value
    routing_key: Annotated[str, shows(pattern=f"^{ROUTING_KEY.pattern}$")] | None = None
    events: (
        Annotated[list[Annotated[str, shows(enum=list(EventGroup))]], shows(minItems=1, uniqueItems=True)] | None
    ) = None


class WebhookView(msgspec.Struct, frozen=True):
    """A webhook and the state of its deliveries.

    `routing_key_hint` are the last characters of the routing key, which is not shown; `routing_key_hash` is its
    HMAC-SHA256 under the URL, by which `moiety apply` notices another key. `pending` and `dead` count events
    that wait and events given up in the last 30 days; the others are the times of the last success and the last
    failure, and the cause of that failure.
    """

    id: str
    url: str
    format: str
    routing_key_hint: str | None
    routing_key_hash: str | None
    events: list[str]
    created_at: datetime
    pending: int
    dead: int
    delivered_at: datetime | None
    failed_at: datetime | None
    last_error: str | None

    @classmethod
    def of(cls, webhook: Webhook, pending: int, dead: int) -> WebhookView:
        key = webhook.routing_key
        return copy_fields(
            webhook,
            cls,
            routing_key_hint=None if key is None else key[-HINT_LENGTH:],
            routing_key_hash=None if key is None else hash_routing_key(webhook.url, key),
            events=[group.value for group in webhook.groups],
            pending=pending,
            dead=dead,
            delivered_at=_moment(webhook.delivered_ms),
            failed_at=_moment(webhook.failed_ms),
        )


class WebhookViews(msgspec.Struct, frozen=True):
    """All webhooks, oldest first."""

    data: list[WebhookView]


class CreatedWebhook(msgspec.Struct, frozen=True):
    """A new webhook with its `secret`, which is shown only once."""

    webhook: WebhookView
    secret: str


class DeliveryReport(msgspec.Struct, frozen=True):
    """Result of a test delivery.

    `status` is the receiver's status, null without a response; `error` is the cause where it was not delivered, as in
    `last_error`. `excerpt` is the beginning of the response's body: text of the receiver, which is not to be trusted.
    """

    event_id: str
    delivered: bool
    status: int | None
    error: str | None
    duration_ms: float
    excerpt: str


def _moment(unix_ms: int | None) -> datetime | None:
    return None if unix_ms is None else datetime.fromtimestamp(unix_ms / 1000, UTC)
