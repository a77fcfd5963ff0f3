"""Digest of a request's body, by which a quote recognizes its request."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256

from litestar.types import HTTPReceiveMessage, Receive

from moiety_platform.errors import BadRequest

INLINE_BYTES = 64 * 1024  # larger bodies are decoded in a thread
UNBOUND_FIELDS = frozenset(
    ("stream", "stream_options", "service_tier", "user", "safety_identifier", "metadata", "store", "background")
)
"""Fields that change neither the price nor the times: a request may send others than its quote."""


class RecordedBody:
    """Receives a request's body and keeps its bytes. Call it in place of the ASGI `receive`."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._chunks: list[bytes] = []

    async def __call__(self) -> HTTPReceiveMessage:
        message = await self._receive()
        if message["type"] == "http.request":
            self._chunks.append(message["body"])
        return message  # type: ignore[return-value]  # requests have no messages of web sockets

    async def digest(self) -> bytes:
        """Return the digest of the received body. Raises BadRequest for a body that is no JSON object."""
        data = b"".join(self._chunks)
        return digest_of(data) if len(data) <= INLINE_BYTES else await asyncio.to_thread(digest_of, data)


def digest_of(data: bytes) -> bytes:
    """Return the SHA-256 of the JSON object, independent of white space, the order of keys, and unbound fields.

    Raises BadRequest for other data.
    """
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        body = None
    if not isinstance(body, dict):
        raise BadRequest("the body must be a JSON object; send one with at least 'model'", code="invalid_json")
    bound = {name: value for name, value in body.items() if name not in UNBOUND_FIELDS}
    return sha256(json.dumps(bound, sort_keys=True, separators=(",", ":")).encode()).digest()
