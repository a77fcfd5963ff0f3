"""CURVE keys of an encrypted engine connection."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85-encoded keys that encrypt and authenticate the connection."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes
