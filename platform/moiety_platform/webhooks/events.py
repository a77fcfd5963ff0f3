"""Events of webhooks, independent of the form in which they are sent, and the signature of a request. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from moiety_platform.alerts.models import AlertSeverity, OperationalAlert
from moiety_platform.quota.kinds import LimitKind, show_amount, window_end
from moiety_platform.quota.models import QuotaAlert
from moiety_wire.shared_fields import copy_fields

SIGNATURE_HEADER = "Moiety-Signature"
SECRET_PREFIX = "whsec_"
SOURCE = "moiety"
TEST_EVENT = "webhook.test"


class ThresholdEvent(msgspec.Struct, frozen=True):
    """The use of a quota has passed `threshold` percent of its `cap` in a window.

    `used` is the use at that time, in nano-dollars where `kind` is of money. `id` is the same for every retry of the
    event.
    """

    id: str
    type: str
    at: datetime
    tenant_id: str | None
    level: str
    scope_id: str
    quota_id: str
    kind: str
    cap: int
    used: int
    threshold: int
    window_start: datetime
    window_end: datetime


class OperationalEvent(msgspec.Struct, frozen=True):
    """A condition of an engine, a disk or an SLO fires, or is resolved. Both events have the same `condition_id`."""

    id: str
    type: str
    at: datetime
    condition_id: str
    status: str
    severity: str
    subject: str
    summary: str
    details: dict[str, Any]


class DeliveryTestEvent(msgspec.Struct, frozen=True):
    """A test delivery, which an administrator has requested."""

    id: str
    type: str
    at: datetime
    summary: str


class WebhookEvent(msgspec.Struct, frozen=True):
    """An event with the texts that people read, from which the body of every format is made.

    `content` is the body in the format `json`. Events with the same `condition` belong together: a resolved one ends
    what the others began. `facts` are labels and values.
    """

    content: ThresholdEvent | OperationalEvent | DeliveryTestEvent
    condition: str
    summary: str
    severity: AlertSeverity
    source: str
    facts: tuple[tuple[str, str], ...]
    is_resolved: bool = False


def event_of_quota(alert: QuotaAlert, tenant: str | None) -> WebhookEvent:
    """Return the event of a quota's alert; `tenant` is the name of its tenant."""
    kind = LimitKind(alert.kind)
    period = kind.period
    assert period is not None, "alerts are of stocks, which have a period"
    content = copy_fields(
        alert,
        ThresholdEvent,
        type="quota.threshold",
        threshold=alert.percent,
        window_start=alert.start,
        window_end=window_end(period, alert.start),
    )
    whose = tenant or alert.tenant_id or "a key without a tenant"
    return WebhookEvent(
        content,
        condition=f"quota/{alert.quota_id}/{alert.start:%Y-%m-%dT%H:%M}",
        summary=f"{alert.percent} % of {alert.kind} of {whose} is used",
        severity=AlertSeverity.CRITICAL if alert.percent == 100 else AlertSeverity.WARNING,
        source=whose,
        facts=(
            ("Tenant", whose),
            ("Limit", f"{alert.kind} of the {alert.level} {alert.scope_id}"),
            ("Used", f"{show_amount(kind, alert.used)} of {show_amount(kind, alert.cap)}"),
            ("Window ends", f"{content.window_end:%Y-%m-%d %H:%M} UTC"),
        ),
    )


def event_of_condition(alert: OperationalAlert) -> WebhookEvent:
    """Return the event of an operational alert."""
    return WebhookEvent(
        copy_fields(alert, OperationalEvent),
        condition=f"condition/{alert.condition_id}",
        summary=alert.summary,
        severity=AlertSeverity(alert.severity),
        source=alert.subject,
        facts=(("Event", alert.type), ("Subject", alert.subject), *((k, str(v)) for k, v in alert.details.items())),
        is_resolved=alert.status == "resolved",
    )


def event_of_test(event_id: str, at: datetime, *, is_resolved: bool = False) -> WebhookEvent:
    """Return the event of a test delivery."""
    summary = "Test delivery of a webhook of Moiety"
    return WebhookEvent(
        DeliveryTestEvent(event_id, TEST_EVENT, at, summary),
        condition=f"test/{event_id}",
        summary=summary,
        severity=AlertSeverity.INFO,
        source=SOURCE,
        facts=(("Event", TEST_EVENT),),
        is_resolved=is_resolved,
    )


def derive_secret(webhook_id: str, pepper: bytes) -> str:
    """Return a webhook's secret: 256 bits that cannot be computed without the pepper."""
    return SECRET_PREFIX + hmac.digest(pepper, b"webhook:" + webhook_id.encode(), hashlib.sha256).hex()


def signature(secrets: Sequence[str], body: bytes, unix_s: int) -> str:
    """Return the header's value: the time, and for each secret the HMAC-SHA256 of the time, a dot and the body."""
    signed = b"%d." % unix_s + body
    macs = (hmac.digest(secret.encode(), signed, hashlib.sha256).hex() for secret in secrets)
    return ",".join([f"t={unix_s}", *(f"v1={mac}" for mac in macs)])
