"""Encryption of contents at rest, by a key that is derived from the deployment's pepper.

Each content is bound to its tenant and its request, so a row that is copied to another does not decrypt. During a
rotation of the pepper, contents under the next and the previous one are read too; once the previous one is dropped,
older contents cannot be read any more.
"""

from __future__ import annotations

import msgspec

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.auth.tenant_cipher import TenantCipher
from moiety_platform.request_contents.terms import Content

_PURPOSE = b"moiety: contents of logged requests"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Content).decode


class ContentCipher:
    """Encrypts and decrypts contents. Immutable and thread-safe."""

    def __init__(self, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        self._cipher = TenantCipher(_PURPOSE, pepper, rotation)

    def encrypt(self, tenant_id: str, request_id: str, content: Content) -> bytes:
        """Return the encrypted content of a request."""
        return self._cipher.encrypt(_encode(content), tenant_id, request_id)

    def decrypt(self, tenant_id: str, request_id: str, sealed: bytes) -> Content | None:
        """Return the content, or None where no known pepper has encrypted it for this tenant and request."""
        content = self._cipher.decrypt(sealed, tenant_id, request_id)
        return None if content is None else _decode(content)
