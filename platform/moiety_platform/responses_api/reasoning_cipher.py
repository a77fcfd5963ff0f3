"""Encryption of reasoning and summaries that clients keep for later requests.

A client that stores no responses gets them encrypted and sends them back. The key is derived from the deployment's
pepper, and each text is bound to its tenant, so only the tenant's own requests to this deployment can use it. During a
rotation of the pepper, texts under the next and the previous one are read too.
"""

from __future__ import annotations

import base64
import binascii
import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from moiety_platform.auth.pepper import PepperRotation

_VERSION = b"\x01"
_NONCE_BYTES = 12
_PURPOSE = b"moiety: texts of models that clients keep"


class ReasoningCipher:
    """Encrypts texts of a tenant, and decrypts those that clients send back. Immutable."""

    def __init__(self, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        others = () if rotation is None else (rotation.coming, rotation.previous)
        self._keys = [_key_of(one) for one in (pepper, *others) if one is not None]

    def encrypt(self, tenant_id: str, kind: str, text: str) -> str:
        """Return the text of an item of type `kind` for the tenant's client, in the letters of URLs."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        sealed = self._keys[0].encrypt(nonce, text.encode(errors="replace"), _bound_to(tenant_id, kind))
        return base64.urlsafe_b64encode(_VERSION + nonce + sealed).decode("ascii")

    def decrypt(self, tenant_id: str, kind: str, encrypted: str) -> str | None:
        """Return the text, or None where this deployment has not encrypted it for the tenant and that type of item."""
        try:
            data = base64.b64decode(encrypted, altchars=b"-_", validate=True)
        except (binascii.Error, ValueError):
            return None
        version, nonce, sealed = data[:1], data[1 : 1 + _NONCE_BYTES], data[1 + _NONCE_BYTES :]
        if version != _VERSION or len(nonce) < _NONCE_BYTES:
            return None
        for key in self._keys:
            try:
                return key.decrypt(nonce, sealed, _bound_to(tenant_id, kind)).decode()
            except InvalidTag:
                continue
        return None


def _key_of(pepper: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(pepper))


def _bound_to(tenant_id: str, kind: str) -> bytes:
    return b"%b%b\0%b" % (_VERSION, kind.encode(), tenant_id.encode())
