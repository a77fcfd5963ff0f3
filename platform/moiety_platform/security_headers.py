"""Headers of every response that protect against misuse by browsers and caches: OWASP's list for REST services.

docs/http.md explains each, and which ones the TLS proxy must add.
"""

from __future__ import annotations

SECURITY_HEADERS: list[tuple[str, str]] = [
    ("cache-control", "no-store"),
    ("content-security-policy", "frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
]

AS_BYTES = b"".join(f"{name}: {value}\r\n".encode("ascii") for name, value in SECURITY_HEADERS)
"""The headers as lines of a response head."""
