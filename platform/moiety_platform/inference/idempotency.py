"""Idempotent requests: a request with the `Idempotency-Key` of an earlier one gets that one's stored answer.

The key is claimed before the request has a record, so a replayed answer has no usage row and no charge. The answer is
stored just before its last bytes are sent. If the request fails, the key is released before the client gets the error.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

import structlog
from litestar.types import Receive, ReceiveMessage, Scope

from moiety_platform.auth.principal import Principal
from moiety_platform.errors import PlatformError
from moiety_platform.idempotency.key_store_client import IdempotencyKeys
from moiety_platform.idempotency.keys import KeyBinding, key_of
from moiety_platform.idempotency.store import StoredAnswer
from moiety_platform.inference.response import STREAM_ID, HttpResponse, WatchingForDisconnect
from moiety_platform.metrics import Metrics

Resume = Callable[[Principal, str], Awaitable[AsyncGenerator[bytes]]]  # from the id of a stored stream to its events

log = structlog.get_logger(__name__)


async def claim_key(
    keys: IdempotencyKeys,
    metrics: Metrics,
    principal: Principal,
    endpoint: str,
    scope: Scope,
    receive: Receive,
    response: HttpResponse,
    max_body_bytes: int,
    resume: Resume | None = None,
) -> Receive | None:
    """Claim the request's key for `response`, and return a `receive` that reads the body again.

    Returns None if `response` has replayed the stored answer, or the stored stream that `resume` returns. A body that
    is too large or incomplete claims nothing, since its request is refused. Raises BadKey, KeyReused, KeyInUse,
    AnswerNotStored, TooManyKeys, Unavailable, and what `resume` raises.
    """
    key = key_of(scope["headers"])
    body, receive = await _read_ahead(receive, max_body_bytes)
    if key is None or body is None:
        return receive
    bound_to = KeyBinding(principal.tenant_id, principal.project_id, principal.allowed_models, endpoint, body)
    try:
        found = await keys.claim(key, bound_to)
    except PlatformError as error:
        metrics.observe_idempotency(error.code)
        raise
    if isinstance(found, StoredAnswer):
        metrics.observe_idempotency("replayed")
        log.info(
            "idempotent_response_replayed",
            request_id=response.request_id,
            tenant_id=principal.tenant_id,
            endpoint=endpoint,
        )
        stream_id = found.headers.get(STREAM_ID)
        if stream_id is None or resume is None:
            await response.replay(found)
            return None
        with WatchingForDisconnect(response.disconnect):
            await response.resume(found, await resume(principal, stream_id))
        return None
    response.claim = found
    return receive


async def _read_ahead(receive: Receive, max_bytes: int) -> tuple[bytes | None, Receive]:
    """Return the body, None if it does not end within `max_bytes`, and a `receive` that starts from its beginning."""
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
