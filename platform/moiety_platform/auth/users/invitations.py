"""Invitations as text: `inv_<user>.<expiry>.<nonce>.<signature>`. Pure except for the random numbers.

The signature is an HMAC under the pepper, so a gateway refuses an invented invitation without the database. The
database has only a hash, which is deleted when the invitation is accepted or replaced.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from moiety_platform.auth.keys import random_base62
from moiety_platform.errors import Forbidden, Gone

NONCE_LENGTH = 24
INVITATION_INVALID = "invitation_invalid"
INVITATION_ENDED = "invitation_ended"

_SHAPE = re.compile(
    rf"(inv_(usr_[a-z0-9]{{20}})\.([0-9]{{1,12}})\.[A-Za-z0-9]{{{NONCE_LENGTH}}})\.([0-9a-f]{{64}})", re.ASCII
)


@dataclass(frozen=True, slots=True)
class Invitation:
    """A verified invitation. `stored_hash` is what the database has of it while it is open."""

    user_id: str
    expires_at: datetime
    stored_hash: bytes


def create_invitation(user_id: str, expires_at: datetime, pepper: bytes) -> tuple[str, bytes]:
    """Return the text of a new invitation, and its hash."""
    signed = f"inv_{user_id}.{int(expires_at.timestamp())}.{random_base62(NONCE_LENGTH)}"
    text = f"{signed}.{_sign(signed, pepper)}"
    return text, _hash(text, pepper)


def read_invitation(text: str, pepper: bytes, now: datetime) -> Invitation:
    """Return the invitation in a text. Raises Forbidden if it was not signed here, or Gone if it has expired."""
    match = _SHAPE.fullmatch(text.strip())
    if match is None or not hmac.compare_digest(match[4], _sign(match[1], pepper)):
        raise Forbidden(
            "This is not a valid invitation. Copy the whole link again, or ask for a new one.", code=INVITATION_INVALID
        )
    expires_at = datetime.fromtimestamp(int(match[3]), UTC)
    if expires_at <= now:
        raise invitation_ended("has expired")
    return Invitation(match[2], expires_at, _hash(match[0], pepper))


def invitation_ended(why: str) -> Gone:
    """Return the error of an invitation that was valid once."""
    return Gone(f"This invitation {why}. Ask for a new one: moiety user invite EMAIL.", code=INVITATION_ENDED)


def _sign(signed: str, pepper: bytes) -> str:
    return hmac.digest(pepper, b"invitation:" + signed.encode(), hashlib.sha256).hex()


def _hash(text: str, pepper: bytes) -> bytes:
    return hmac.digest(pepper, b"invitation-hash:" + text.encode(), hashlib.sha256)
