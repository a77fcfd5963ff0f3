"""The keys of an encrypted link."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurveKeys:
    """Z85 keys that encrypt and authenticate the link."""

    server_public: bytes
    client_public: bytes
    client_secret: bytes
