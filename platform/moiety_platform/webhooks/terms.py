"""Terms of webhooks that commands need, too. Pure: no SQL."""

from __future__ import annotations

import hashlib
import hmac
from enum import StrEnum

HINT_LENGTH = 4  # characters of a routing key that are shown


def hash_routing_key(url: str, routing_key: str) -> str:
    """Return a hash by which a routing key can be compared without being shown, keyed by the webhook's URL."""
    return hmac.digest(b"routing-key:" + url.encode(), routing_key.encode(), hashlib.sha256).hex()


class WebhookFormat(StrEnum):
    """Form of the bodies that a webhook receives."""

    JSON = "json"  # the event itself
    SLACK = "slack"  # a message of an incoming webhook
    PAGERDUTY = "pagerduty"  # an event of the Events API v2


class EventGroup(StrEnum):
    """Groups of events; a webhook can be limited to some of them."""

    QUOTA = "quota"
    ENGINE = "engine"
    SLO = "slo"
    DISK = "disk"
