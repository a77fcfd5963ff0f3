"""The pepper: a secret of the deployment, outside the database, without which the stored hashes of keys are useless."""

from __future__ import annotations

import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from moiety_platform.auth.keys import MIN_PEPPER_BYTES

FILE_NAME = "pepper"
_NEW_BYTES = 32


class BadPepper(ValueError):
    """The pepper is missing or too weak; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Pepper:
    """The pepper under a type of its own, whose repr does not show it."""

    value: bytes = field(repr=False)


def resolve_pepper(configured: str | None, data_dir: Path) -> bytes:
    """The configured pepper; or else the one in `data_dir`, made there at the first start. Every gateway on one
    database needs the same. Raises BadPepper."""
    if configured is not None:
        return _checked(configured.encode(), "MOIETY_KEY_PEPPER")
    path = data_dir / FILE_NAME
    if not path.exists():
        _create(path)
    return _checked(path.read_bytes().strip(), str(path))


def _create(path: Path) -> None:
    """Write a new pepper whole or not at all; of several processes that try, the first one wins."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_hex(_NEW_BYTES) + "\n")
        file.flush()
        os.fsync(file.fileno())
    try:
        os.link(draft, path)
    except FileExistsError:
        pass  # another process was first; its pepper counts
    finally:
        draft.unlink()


def _checked(pepper: bytes, origin: str) -> bytes:
    if len(pepper) < MIN_PEPPER_BYTES:
        raise BadPepper(
            f"the key pepper from {origin} has {len(pepper)} bytes; use at least {MIN_PEPPER_BYTES} random ones, "
            "and keep it: keys made under another pepper stop working"
        )
    return pepper
