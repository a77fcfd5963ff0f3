"""Encryption of contents at rest, by a key that is derived from the deployment's pepper.

Each content is bound to its tenant and its request, so a row that is copied to another does not decrypt. During a
rotation of the pepper, contents under the next and the previous one are read too; once the previous one is dropped,
older contents cannot be read any more.
"""

from __future__ import annotations

import secrets

import msgspec
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from moiety_platform.auth.pepper import PepperRotation
from moiety_platform.request_contents.terms import Content

_VERSION = b"\x01"
_NONCE_BYTES = 12
_PURPOSE = b"moiety: contents of logged requests"
_encode = msgspec.json.Encoder().encode
_decode = msgspec.json.Decoder(Content).decode


class ContentCipher:
    """Encrypts and decrypts contents (AES-256-GCM). Immutable and thread-safe."""

    def __init__(self, pepper: bytes, rotation: PepperRotation | None = None) -> None:
        others = () if rotation is None else (rotation.coming, rotation.previous)
        self._keys = [_key_of(one) for one in (pepper, *others) if one is not None]

    def encrypt(self, tenant_id: str, request_id: str, content: Content) -> bytes:
        """Return the encrypted content of a request."""
        nonce = secrets.token_bytes(_NONCE_BYTES)
        return _VERSION + nonce + self._keys[0].encrypt(nonce, _encode(content), _bound_to(tenant_id, request_id))

    def decrypt(self, tenant_id: str, request_id: str, sealed: bytes) -> Content | None:
        """Return the content, or None where no known pepper has encrypted it for this tenant and request."""
        version, nonce, rest = sealed[:1], sealed[1 : 1 + _NONCE_BYTES], sealed[1 + _NONCE_BYTES :]
        if version != _VERSION or len(nonce) < _NONCE_BYTES:
            return None
        for key in self._keys:
            try:
                return _decode(key.decrypt(nonce, rest, _bound_to(tenant_id, request_id)))
            except InvalidTag:
                continue
        return None


def _key_of(pepper: bytes) -> AESGCM:
    return AESGCM(HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(pepper))


def _bound_to(tenant_id: str, request_id: str) -> bytes:
    return b"%b%b\0%b" % (_VERSION, tenant_id.encode(), request_id.encode())
