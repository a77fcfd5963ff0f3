"""Encryption of reasoning and summaries that clients keep for later requests.

A client that stores no responses gets them encrypted and sends them back. The key is derived from the deployment's
pepper, and each text is bound to its tenant, so only the tenant's own requests to this deployment can use it. During a
rotation of the pepper, texts under the next and the previous one are read too.
"""

from __future__ import annotations

import base64
import binascii

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.auth.tenant_cipher import TenantCipher

_PURPOSE = b"moiety: texts of models that clients keep"


class ReasoningCipher:
    """Encrypts texts of a tenant, and decrypts those that clients send back. Immutable."""

    def __init__(self, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        self._cipher = TenantCipher(_PURPOSE, pepper, rotation)

    def encrypt(self, tenant_id: str, kind: str, text: str) -> str:
        """Return the text of an item of type `kind` for the tenant's client, in the letters of URLs."""
        sealed = self._cipher.encrypt(text.encode(errors="replace"), kind, tenant_id)
        return base64.urlsafe_b64encode(sealed).decode("ascii")

    def decrypt(self, tenant_id: str, kind: str, encrypted: str) -> str | None:
        """Return the text, or None where this deployment has not encrypted it for the tenant and that type of item."""
        try:
            data = base64.b64decode(encrypted, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        text = self._cipher.decrypt(data, kind, tenant_id)
        return None if text is None else text.decode()
