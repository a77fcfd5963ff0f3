"""Validation, hash and request binding of idempotency keys. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256

from moiety_platform.idempotency.errors import BadKey

HEADER = b"idempotency-key"
MAX_KEY_LENGTH = 255

_KEY = re.compile(rb"[\x21-\x7e]{1,255}")


def key_of(headers: Iterable[tuple[bytes, bytes]]) -> bytes | None:
    """Return the key of a request, or None if it has none. Raises BadKey."""
    given = [value for name, value in headers if name == HEADER]
    if not given:
        return None
    if len(given) > 1:
        raise BadKey("There is more than one Idempotency-Key; send one")
    if not _KEY.fullmatch(given[0]):
        raise BadKey(
            f"An Idempotency-Key must have 1 to {MAX_KEY_LENGTH} visible ASCII characters, without spaces; use a new "
            "UUID for each request"
        )
    return given[0]


def hash_of(key: bytes) -> bytes:
    """Return the hash that is stored instead of the key."""
    return sha256(key).digest()


@dataclass(frozen=True, slots=True)
class KeyBinding:
    """The request that a key is bound to: endpoint, body and the caller's rights.

    The rights are included so that no API key of a tenant gets an answer that it may not request itself.
    `allowed_models` None means every model.
    """

    tenant_id: str
    project_id: str
    allowed_models: frozenset[str] | None
    endpoint: str
    body: bytes

    def fingerprint(self) -> bytes:
        models = "*" if self.allowed_models is None else "\n".join(sorted(self.allowed_models))
        digest = sha256()
        for part in (self.endpoint.encode(), self.project_id.encode(), models.encode(), self.body):
            digest.update(len(part).to_bytes(8, "big"))
            digest.update(part)
        return digest.digest()
