"""Entries of a deployment's Secret. Pure, except for the system's randomness."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from urllib.parse import quote

import zmq

from moiety_platform.cluster.errors import HalfAPair, UnusableEntry

RANDOM_BYTES = 32
DATABASE_PORT = 5432


def missing_entries(present: Mapping[str, bytes], database_host: str | None) -> dict[str, bytes]:
    """Return the entries that a Secret with the `present` entries lacks. Raises HalfAPair and UnusableEntry.

    `database_host` is the host of the bundled database, if there is one; its password is then among the entries.
    """
    made = {name: secrets.token_hex(RANDOM_BYTES).encode() for name in ("pepper", "traces-token")}
    for owner in ("engine", "gateway"):
        public, secret = f"curve-{owner}-public", f"curve-{owner}-secret"
        if secret in present:
            made[public] = _public_of(secret, present[secret])
        elif public in present:
            raise HalfAPair(f"there is {public} without {secret}: add the secret key, or delete the public one")
        else:
            made[public], made[secret] = zmq.curve_keypair()
    if database_host is not None:
        made["database-password"] = secrets.token_hex(RANDOM_BYTES).encode()
        password = quote(_text("database-password", {**made, **present}["database-password"]), safe="")
        made["database-url"] = f"postgresql://moiety:{password}@{database_host}:{DATABASE_PORT}/moiety".encode()
    return {name: value for name, value in made.items() if name not in present}


def _public_of(name: str, secret_key: bytes) -> bytes:
    try:
        public: bytes = zmq.curve_public(secret_key)
    except ValueError as exc:
        raise UnusableEntry(
            f"the entry {name} is no CURVE key of 40 characters of Z85: make it without a line's end, or delete it and "
            "let it be made"
        ) from exc
    return public


def _text(name: str, value: bytes) -> str:
    try:
        return value.decode()
    except UnicodeDecodeError:
        raise UnusableEntry(f"the entry {name} is not text in UTF-8: replace it") from None
