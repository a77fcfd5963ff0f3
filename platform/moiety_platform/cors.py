"""Cross-origin requests of browsers (the Fetch standard's CORS protocol), for the routes that clients call.

Off unless the operator names origins. Credentials are never allowed: the API has no cookies, and a page sends its key
in a header. The admin API is not open to pages of other origins.
"""

from __future__ import annotations

import re
from collections.abc import Collection

from litestar.types import Message, Scope, Send

from moiety_platform.inference.response import SEND_WHOLE
from moiety_platform.origins import ANY_ORIGIN

CLOSED_PREFIX = "/admin/"
MAX_AGE_S = 7200  # Chromium's limit; browsers repeat the preflight request afterwards
METHODS = b"GET, HEAD, POST, DELETE, OPTIONS"
MAX_HEADERS_BYTES = 4096
_HEADER_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class CrossOriginPolicy:
    """The origins whose pages may call the API."""

    def __init__(self, origins: Collection[str]) -> None:
        """Create a policy for these origins. ANY_ORIGIN among them allows every origin."""
        self._allows_all = ANY_ORIGIN in origins
        self._origins = frozenset(origin.encode("latin-1") for origin in origins)

    def origin_headers(self, scope: Scope) -> list[tuple[bytes, bytes]]:
        """Return the headers that let a browser read the response. Empty if its page is of another origin."""
        origin = _field(scope, b"origin")
        if origin is None or scope["path"].startswith(CLOSED_PREFIX):
            return []
        if self._allows_all:
            return [(b"access-control-allow-origin", b"*")]
        if origin.lower() not in self._origins:
            return []
        return [(b"access-control-allow-origin", origin), (b"vary", b"Origin")]


def cross_origin_policy(origins: Collection[str]) -> CrossOriginPolicy | None:
    """Return the policy for these origins, None if there are none."""
    return CrossOriginPolicy(origins) if origins else None


async def answer_preflight(headers: list[tuple[bytes, bytes]], scope: Scope, send: Send) -> None:
    """Answer a preflight request from an allowed origin."""
    fields = [
        *headers,
        (b"access-control-allow-methods", METHODS),
        (b"access-control-max-age", b"%d" % MAX_AGE_S),
        (b"content-length", b"0"),
    ]
    asked = _field(scope, b"access-control-request-headers") or b""
    if len(asked) <= MAX_HEADERS_BYTES and _HEADER_NAMES.fullmatch(asked):
        fields.append((b"access-control-allow-headers", asked))  # SDKs send many, and a header gives no rights
    await send({"type": "http.response.start", "status": 204, "headers": fields})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def is_preflight(scope: Scope) -> bool:
    """Return whether a browser asks if it may send the request."""
    return scope.get("method") == "OPTIONS" and _field(scope, b"access-control-request-method") is not None


def with_origin_headers(headers: list[tuple[bytes, bytes]], scope: Scope, send: Send) -> Send:
    """Return a `send` that adds the headers to the response, and lets the page read the others."""
    scope["state"].pop(SEND_WHOLE, None)  # it would send the response without ASGI messages
    more = [*headers, (b"access-control-expose-headers", b"*")]

    async def send_with_headers(message: Message) -> None:
        if message["type"] == "http.response.start":
            message["headers"] = [*message["headers"], *more]
        await send(message)

    return send_with_headers


def _field(scope: Scope, header: bytes) -> bytes | None:
    return next((value for name, value in scope["headers"] if name == header), None)
