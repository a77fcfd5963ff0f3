"""Encryption of tenants' texts by a key that is derived from the deployment's pepper.

Each text is bound to what its owner names, such as its tenant and its request, and decrypts with the same binding
only. During a rotation of the pepper, texts under the next and the previous one are read too.
"""

from __future__ import annotations

import secrets

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from moiety_platform.auth.pepper import PepperRotation

_VERSION = b"\x01"
_NONCE_BYTES = 12


class TenantCipher:
    """Encrypts and decrypts (AES-256-GCM). `purpose` separates its keys from others. Immutable and thread-safe."""

    def __init__(self, purpose: bytes, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        others = () if rotation is None else (rotation.coming, rotation.previous)
        self._keys = [_key_of(purpose, one) for one in (pepper, *others) if one is not None]

    def encrypt(self, content: bytes, *binding: str) -> bytes:
        """Return the version, a random nonce and the encrypted content."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._keys[0].encrypt(nonce, content, _bound_to(binding))

    def decrypt(self, sealed: bytes, *binding: str) -> bytes | None:
        """Return the content, or None where no known pepper has encrypted it with this binding."""
        version, nonce, rest = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if version != _VERSION or len(nonce) < _NONCE_BYTES:
            return None
        for key in self._keys:
            try:
                return key.decrypt(nonce, rest, _bound_to(binding))
            except InvalidTag:
                continue
        return None


def _key_of(purpose: bytes, pepper: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=purpose).derive(pepper))


def _bound_to(binding: tuple[str, ...]) -> bytes:
    return _VERSION + b"\0".join(part.encode() for part in binding)
