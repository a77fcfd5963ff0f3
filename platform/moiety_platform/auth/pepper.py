"""The pepper: a secret of the deployment, outside the database, without which the stored hashes of keys are useless.

During a rotation there are two: gateways that know the next one accept keys that others have hashed with it, and
gateways that know the previous one rehash the keys in use.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import SecretStr

from moiety_platform.auth.keys import MIN_PEPPER_BYTES
from moiety_platform.private_files import create_private
from moiety_platform.settings import GatewaySettings

FILE_NAME = "pepper"
PREVIOUS_FILE_NAME = "pepper.previous"
_NEW_BYTES = 32


class BadPepper(ValueError):
    """The pepper is missing or too weak; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Pepper:
    """Pepper, wrapped in a type whose repr hides it."""

    value: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class PepperRotation:
    """The next and the previous pepper, which are accepted beside the current one during a rotation."""

    coming: bytes | None = field(default=None, repr=False)
    previous: bytes | None = field(default=None, repr=False)


def pepper_of(settings: GatewaySettings) -> bytes:
    """Return the gateway's pepper. Raises BadPepper."""
    return resolve_pepper(_text(settings.key_pepper), settings.data_dir)


def pepper_rotation_of(settings: GatewaySettings) -> PepperRotation:
    """Return the next and the previous pepper; a data directory keeps the previous one in a file. Raises BadPepper."""
    coming, previous = _text(settings.key_pepper_next), _text(settings.key_pepper_previous)
    file = settings.data_dir / PREVIOUS_FILE_NAME
    kept = None if previous is None else _checked(previous.encode(), "MOIETY_KEY_PEPPER_PREVIOUS")
    if kept is None and settings.key_pepper is None and file.exists():
        kept = _checked(file.read_bytes().strip(), str(file))
    return PepperRotation(None if coming is None else _checked(coming.encode(), "MOIETY_KEY_PEPPER_NEXT"), kept)


def resolve_pepper(configured: str | None, data_dir: Path) -> bytes:
    """Return the configured pepper, or else the one in `data_dir`, which the first start creates.

    All gateways on one database need the same. Raises BadPepper.
    """
    if configured is not None:
        return _checked(configured.encode(), "MOIETY_KEY_PEPPER")
    path = data_dir / FILE_NAME
    if not path.exists():
        create_private(path, secrets.token_hex(_NEW_BYTES).encode() + b"\n")
    return _checked(path.read_bytes().strip(), str(path))


def _text(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _checked(pepper: bytes, origin: str) -> bytes:
    if len(pepper) < MIN_PEPPER_BYTES:
        raise BadPepper(
            f"the key pepper from {origin} has {len(pepper)} bytes; use at least {MIN_PEPPER_BYTES} random ones, "
            "and keep it: keys created with another pepper stop working"
        )
    return pepper
