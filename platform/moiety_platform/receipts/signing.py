"""Keys that sign receipts (Ed25519), in a file of PEM blocks: the first one signs, all can be verified.

The first start of a gateway creates the file. To rotate, write a new private key before the old ones, or replace the
file: public keys that have signed stay in the database.
"""

from __future__ import annotations

import base64
import hashlib
import os
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)

from moiety_platform.private_files import create_private
from moiety_platform.receipts.content import signed_bytes

FILE_NAME = "receipts.pem"
ALGORITHM = "Ed25519"
_BEGIN = b"-----BEGIN "


class BadReceiptKey(ValueError):
    """The file of receipt keys cannot be used; the message says what to do."""


@dataclass(frozen=True, slots=True)
class ReceiptSigner:
    """Private keys of one gateway, the signing one first."""

    keys: tuple[Ed25519PrivateKey, ...]

    @property
    def key_id(self) -> str:
        return key_id_of(self.public_key)

    @property
    def public_key(self) -> bytes:
        """Public half of the signing key."""
        return self.keys[0].public_key().public_bytes_raw()

    @property
    def public_keys(self) -> list[bytes]:
        """Public halves of all keys of the file."""
        return [key.public_key().public_bytes_raw() for key in self.keys]

    def signature(self, content: Mapping[str, Any]) -> dict[str, str]:
        """Return the signature of a receipt's content, as its envelope has it."""
        value = self.keys[0].sign(signed_bytes(content))
        return {"algorithm": ALGORITHM, "key_id": self.key_id, "value": base64.b64encode(value).decode("ascii")}


def key_file_of(configured: Path | None, data_dir: Path) -> Path:
    """Return the file of receipt keys: the configured one, or else that of the data directory."""
    return data_dir / FILE_NAME if configured is None else configured


def load_signer(path: Path) -> ReceiptSigner:
    """Return the signer of a file, which is created with a new key if there is none. Raises BadReceiptKey.

    A file of the process's own user must not be open to others; one that is mounted belongs to another user.
    """
    try:
        if not path.exists():
            create_private(path, _new_pem())
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            data = file.read()
    except OSError as exc:
        raise BadReceiptKey(
            f"the file of receipt keys {path} cannot be used ({exc.strerror}): set receipt_key_file to a file in a "
            "folder that the gateway can write to"
        ) from exc
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == os.geteuid() and mode & 0o077:
        raise BadReceiptKey(
            f"the file of receipt keys {path} can be used by others (mode {mode:o}): if nobody has copied the keys, "
            f"run chmod 600 {shlex.quote(str(path))}; otherwise replace the file"
        )
    blocks = [_BEGIN + block for block in data.split(_BEGIN)[1:]]
    if not blocks:
        raise BadReceiptKey(
            f"the file of receipt keys {path} has no PEM block: write private Ed25519 keys in PKCS #8, or remove the "
            "file to create a new key"
        )
    return ReceiptSigner(tuple(_load(block, path) for block in blocks))


def is_signed(content: Mapping[str, Any], value: str, public_key: bytes) -> bool:
    """Return whether a signature in base64 is that of the content under the public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public_key).verify(
            base64.b64decode(value, validate=True), signed_bytes(content)
        )
    except (InvalidSignature, TypeError, ValueError):  # a value that is no text is no signature
        return False
    return True


def key_id_of(public_key: bytes) -> str:
    """Return the name of a public key: the beginning of its SHA-256."""
    return hashlib.sha256(public_key).hexdigest()[:16]


def _load(block: bytes, path: Path) -> Ed25519PrivateKey:
    try:
        key = load_pem_private_key(block, None)
    except (ValueError, TypeError) as exc:
        raise BadReceiptKey(
            f"the file of receipt keys {path} has a PEM block that cannot be read ({exc}): write private Ed25519 keys "
            "in PKCS #8 without a password"
        ) from exc
    if not isinstance(key, Ed25519PrivateKey):
        raise BadReceiptKey(f"the file of receipt keys {path} has a key of another kind than Ed25519: remove it")
    return key


def _new_pem() -> bytes:
    return Ed25519PrivateKey.generate().private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
