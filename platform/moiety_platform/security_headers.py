"""Headers of every answer that keep browsers and caches from misusing it: OWASP's list for REST services. docs/http.md
says why each is there, and which are for whoever ends TLS."""

from __future__ import annotations

SECURITY_HEADERS: list[tuple[str, str]] = [
    ("cache-control", "no-store"),
    ("content-security-policy", "frame-ancestors 'none'"),
    ("referrer-policy", "no-referrer"),
    ("x-content-type-options", "nosniff"),
    ("x-frame-options", "DENY"),
]

AS_BYTES = b"".join(f"{name}: {value}\r\n".encode("ascii") for name, value in SECURITY_HEADERS)
"""Lines of a head."""
