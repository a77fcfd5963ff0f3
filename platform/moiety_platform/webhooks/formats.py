"""Bodies of webhook requests: the event as JSON, a message for Slack, and an event for PagerDuty. Pure.

Slack: https://api.slack.com/messaging/webhooks and /reference/block-kit. PagerDuty: Events API v2,
https://developer.pagerduty.com/docs/events-api-v2/overview.
"""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.alerts.models import AlertSeverity
from moiety_platform.webhooks.events import SOURCE, WebhookEvent
from moiety_platform.webhooks.terms import WebhookFormat

MAX_HEADER = 150  # characters of Slack's header block
MAX_FIELDS, MAX_FIELD = 10, 2000  # of Slack's section block
MAX_SUMMARY = 1024  # of PagerDuty
MAX_DEDUP_KEY = 255
_SIGNS = {
    AlertSeverity.CRITICAL: "\N{LARGE RED CIRCLE}",
    AlertSeverity.WARNING: "\N{LARGE YELLOW CIRCLE}",
    AlertSeverity.INFO: "\N{LARGE BLUE CIRCLE}",
}
_RESOLVED = "\N{LARGE GREEN CIRCLE}"


def body_of(event: WebhookEvent, form: WebhookFormat, routing_key: str | None = None) -> bytes:
    """Return the body of an event in a format, the same bytes each time. PagerDuty needs the routing key."""
    if form is WebhookFormat.SLACK:
        return msgspec.json.encode(_slack_message(event))
    if form is WebhookFormat.PAGERDUTY:
        assert routing_key is not None, "a webhook for PagerDuty has a routing key"
        return msgspec.json.encode(_pagerduty_event(event, routing_key))
    return msgspec.json.encode(event.content)


def _slack_message(event: WebhookEvent) -> dict[str, Any]:
    """Return a message with blocks of plain text, in which no name can mention people or make a link.

    Only `text`, which notifications show, is parsed by Slack, so it is escaped.
    """
    sign = _RESOLVED if event.is_resolved else _SIGNS[event.severity]
    state = "Resolved: " if event.is_resolved else ""
    title = f"{sign} {state}{event.summary}"
    fields = [_plain_text(f"{label}: {value}", MAX_FIELD) for label, value in event.facts[:MAX_FIELDS]]
    blocks = [
        {"type": "header", "text": _plain_text(title, MAX_HEADER)},
        {"type": "section", "fields": fields},
        {"type": "context", "elements": [_plain_text(f"{event.content.type} {event.content.id}", MAX_FIELD)]},
    ]
    return {"text": _escaped(title[:MAX_FIELD]), "blocks": blocks}


def _plain_text(text: str, longest: int) -> dict[str, Any]:
    return {"type": "plain_text", "text": _cut(text, longest), "emoji": False}


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def _pagerduty_event(event: WebhookEvent, routing_key: str) -> dict[str, Any]:
    """Return an event that opens an incident, or ends the one with the same deduplication key."""
    key = {"routing_key": routing_key, "dedup_key": event.condition[:MAX_DEDUP_KEY]}
    if event.is_resolved:
        return {**key, "event_action": "resolve"}
    content = event.content
    payload = {
        "summary": _cut(event.summary, MAX_SUMMARY),
        "source": event.source or SOURCE,
        "severity": event.severity.value,
        "timestamp": content.at,
        "component": content.type.partition(".")[0],
        "class": content.type,
        "custom_details": {**dict(event.facts), "event": content},
    }
    return {**key, "event_action": "trigger", "client": SOURCE, "payload": payload}


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else text[: longest - 1] + "…"
