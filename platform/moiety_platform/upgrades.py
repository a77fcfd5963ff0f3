"""Requests for a protocol upgrade (`Upgrade: h2c`, `websocket`), which are served without it (RFC 9110, 7.8).

The parser assumes that the request has no body and stops after its head, so that a body (for example of Java's HTTP
client) would be parsed as requests: a new parser gets the body's framing and reads it.
"""

from __future__ import annotations

from collections.abc import Sequence

_FRAMING = (b"content-length", b"transfer-encoding")


def framing_head(fields: Sequence[tuple[bytes, bytes]]) -> bytes | None:
    """Return a head that makes a new parser expect the body of the request with these fields; None without a body.

    Names are in lower case.
    """
    for name, value in fields:
        if name in _FRAMING and value.strip(b" \t0"):
            return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, value)
    return None
