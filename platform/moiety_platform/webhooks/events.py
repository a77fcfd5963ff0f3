"""Contents of a webhook request: the event as JSON, and the signature that authenticates it. Pure."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from datetime import datetime

import msgspec

from moiety_platform.quota.kinds import LimitKind, window_end
from moiety_platform.quota.models import QuotaAlert
from moiety_wire.shared_fields import copy_fields

SIGNATURE_HEADER = "Moiety-Signature"
SECRET_PREFIX = "whsec_"


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


def body_of(alert: QuotaAlert) -> bytes:
    """Return the event of an alert, the same bytes each time."""
    period = LimitKind(alert.kind).period
    assert period is not None, "alerts are of stocks, which have a period"
    return msgspec.json.encode(
        copy_fields(
            alert,
            ThresholdEvent,
            type="quota.threshold",
            threshold=alert.percent,
            window_start=alert.start,
            window_end=window_end(period, alert.start),
        )
    )


def derive_secret(webhook_id: str, pepper: bytes) -> str:
    """Return a webhook's secret: 256 bits that cannot be computed without the pepper."""
    return SECRET_PREFIX + hmac.digest(pepper, b"webhook:" + webhook_id.encode(), hashlib.sha256).hex()


def signature(secrets: Sequence[str], body: bytes, unix_s: int) -> str:
    """Return the header's value: the time, and for each secret the HMAC-SHA256 of the time, a dot and the body."""
    signed = b"%d." % unix_s + body
    macs = (hmac.digest(secret.encode(), signed, hashlib.sha256).hex() for secret in secrets)
    return ",".join([f"t={unix_s}", *(f"v1={mac}" for mac in macs)])
