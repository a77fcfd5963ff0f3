"""Headers of a webhook's request. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from moiety_platform.webhooks.events import SIGNATURE_HEADER, derive_secret, signature


def signed_headers(webhook_id: str, peppers: Sequence[bytes], body: bytes, now: datetime) -> dict[str, str]:
    """Return the headers, with a signature under the secret of each pepper."""
    secrets = [derive_secret(webhook_id, pepper) for pepper in peppers]
    return {
        "Content-Type": "application/json",
        "User-Agent": "moiety-webhooks",
        SIGNATURE_HEADER: signature(secrets, body, int(now.timestamp())),
    }
