"""A request that is served once: with an `Idempotency-Key`, a repeated one gets the first one's answer.

The key is claimed before the request is served, and so before anything of it is counted: a replay has no usage row.
What is sent is kept just before its last bytes go out; what ends otherwise gives the key back, and then the client is
told.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog
from litestar.types import Receive, ReceiveMessage, Scope

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import PlatformError
from moiety_platform.idempotency.key_store_client import IdempotencyKeys
from moiety_platform.idempotency.keys import KeyBinding, key_of
from moiety_platform.idempotency.store import KeptAnswer
from moiety_platform.inference.response import HttpResponse
from moiety_platform.metrics import Metrics
from moiety_platform.request_head import request_id_of

Serve = Callable[[Receive], Awaitable[None]]

log = structlog.get_logger(__name__)


class IdempotentRequests:
    """Serves the requests of POST endpoints, each key once."""

    def __init__(self, keeper: IdempotencyKeys, metrics: Metrics, max_body_bytes: int) -> None:
        self._keeper = keeper
        self._metrics = metrics
        self.max_body_bytes = max_body_bytes

    async def serve(
        self, principal: Principal, endpoint: str, scope: Scope, receive: Receive, reply: HttpResponse, serve: Serve
    ) -> None:
        """Have `serve` read the body and answer by `reply`, or answer from what is kept. A request without a key costs
        nothing here. Raises what `serve` raises, BadKey, and what the keeper raises."""
        key = key_of(scope["headers"])
        if key is None:
            await serve(receive)
            return
        body, receive = await _read_ahead(receive, self.max_body_bytes)
        if body is None:  # too large, or the client has left: refused before anything is served
            await serve(receive)
            return
        try:
            found = await self._keeper.claim(key, _asked(principal, endpoint, body))
        except PlatformError as error:
            self._metrics.observe_idempotency(error.code)
            raise
        if isinstance(found, KeptAnswer):
            self._metrics.observe_idempotency("replayed")
            log.info("replayed", request_id=request_id_of(scope), tenant_id=principal.tenant_id, endpoint=endpoint)
            await reply.replay(found)
            return
        reply.claim = found
        try:
            await serve(receive)
        finally:
            await found.release()


def _asked(principal: Principal, endpoint: str, body: bytes) -> KeyBinding:
    return KeyBinding(principal.tenant_id, principal.project_id, principal.allowed_models, endpoint, body)


async def _read_ahead(receive: Receive, max_bytes: int) -> tuple[bytes | None, Receive]:
    """The body, None if it does not end within `max_bytes`; and what gives all that was read once more."""
    messages: list[ReceiveMessage] = []
    body: bytearray | None = bytearray()
    more = True
    while more and body is not None:
        message = await receive()
        messages.append(message)
        if message["type"] == "http.request":
            body += message["body"]
            more = message["more_body"]
        if message["type"] == "http.disconnect" or len(body) > max_bytes:
            body = None

    async def receive_again() -> ReceiveMessage:
        return messages.pop(0) if messages else await receive()

    return None if body is None else bytes(body), receive_again
