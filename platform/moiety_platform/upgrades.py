"""Requests to go on by another protocol (`Upgrade: h2c`, `websocket`): they are served as if they had not asked, as RFC
9110, 7.8 lets a server do. The parser takes such a request for one without a body and stops behind its head, so that a
body (of Java's HTTP client, for one) would be read as requests: a new parser is told the body's framing and reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

_FRAMING = (b"content-length", b"transfer-encoding")


def framing_head(fields: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return a head by which a new parser expects the body of the request with these fields; None if it has no body.
    Names are in lower case."""
    for name, value in fields:
        if name in _FRAMING and value.strip(b" \t0"):
            return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, value)
    return None
