"""API keys as text and as hashes: `mty_<id>.<secret>`. Pure except for the random numbers; no SQL, no HTTP."""

from __future__ import annotations

import functools
import hashlib
import hmac
import re
import secrets
import string
from dataclasses import dataclass

from moiety_platform.errors import Unauthenticated

PREFIX = "mty_"
ID_LENGTH = 16  # 95 bits: no collisions
SECRET_LENGTH = 32  # base62 characters: 190 bits
HINT_LENGTH = 4
MIN_PEPPER_BYTES = 16
JWT_DOTS = 2
MARK_LENGTH = 16  # hexadecimal digits; length of the column

HOW_TO = "Send your key as 'Authorization: Bearer mty_…', or to /v1/messages as 'x-api-key: mty_…'."

_MAX_HEADER_LENGTH = 512

_ALPHABET = string.ascii_letters + string.digits
_SHAPE = re.compile(rf"{PREFIX}([A-Za-z0-9]{{{ID_LENGTH}}})\.([A-Za-z0-9]{{{SECRET_LENGTH}}})", re.ASCII)


@dataclass(frozen=True, slots=True, repr=False)
class KeyText:
    """A key in clear. Its repr hides the secret, so that no log can show it by accident."""

    key_id: str
    secret: str

    @property
    def text(self) -> str:
        """The text that the client sends."""
        return f"{PREFIX}{self.key_id}.{self.secret}"

    @property
    def hint(self) -> str:
        """The last characters, by which users distinguish their keys."""
        return self.secret[-HINT_LENGTH:]

    def __repr__(self) -> str:
        return f"KeyText({PREFIX}{self.key_id}.…)"


def generate_key() -> KeyText:
    """Return a new random key."""
    return KeyText(key_id=random_base62(ID_LENGTH), secret=random_base62(SECRET_LENGTH))


def parse_key(text: str) -> KeyText | None:
    """Return the key in `text`; None unless it has exactly the form of `generate_key`."""
    match = _SHAPE.fullmatch(text)
    return KeyText(key_id=match[1], secret=match[2]) if match else None


def hash_key(key: KeyText, pepper: bytes) -> bytes:
    """Return the HMAC-SHA256 of the whole key under the deployment's pepper, 32 bytes."""
    keyed = _keyed(pepper).copy()
    keyed.update(f"{PREFIX}{key.key_id}.{key.secret}".encode())
    return keyed.digest()


@functools.lru_cache(maxsize=4)
def mark_of(pepper: bytes) -> str:
    """Return a mark that identifies a pepper and reveals nothing about it."""
    return hmac.digest(pepper, b"mark", hashlib.sha256).hex()[:MARK_LENGTH]


@functools.lru_cache(maxsize=4)
def _keyed(pepper: bytes) -> hmac.HMAC:
    """Return the HMAC state that all keys share, which is most of the work."""
    return hmac.new(pepper, b"key:", hashlib.sha256)


hashes_match = hmac.compare_digest  # in constant time


def derive_cache_salt(tenant_id: str, pepper: bytes) -> bytes:
    """Return the start of a tenant's prefix-cache chain, 32 bytes. Nobody without the pepper can compute it."""
    return hmac.digest(pepper, b"cache-salt" + tenant_id.encode(), hashlib.sha256)


def random_base62(length: int) -> str:
    """Return random letters and digits from the system's source of randomness."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(length))


def read_jwt(authorization: str | None) -> str | None:
    """Return the bearer credential that has the form of a JWT, three parts separated by dots; None if it has not."""
    scheme, _, credential = (authorization or "").partition(" ")
    credential = credential.strip()
    is_jwt = scheme.lower() == "bearer" and credential.count(".") == JWT_DOTS and not credential.startswith(PREFIX)
    return credential if is_jwt else None


def read_key(authorization: str | None) -> KeyText:
    """Return the key, not yet verified. Raises Unauthenticated where the header has none."""
    if not authorization:
        raise Unauthenticated(f"There is no API key in this request. {HOW_TO}", code="missing_api_key")
    scheme, _, credential = authorization[:_MAX_HEADER_LENGTH].partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated(f"The Authorization header must use the Bearer scheme. {HOW_TO}")
    match = _SHAPE.fullmatch(credential.strip())
    if match is None:
        raise Unauthenticated(f"This does not have the format of an API key. Check that it is complete. {HOW_TO}")
    return KeyText(key_id=match[1], secret=match[2])
