"""Id of an HTTP request: the client's valid `X-Request-Id`, or a generated one; included in every response.

Under `MESSAGES_PATH` a response has it under Anthropic's name, too.
"""

from __future__ import annotations

import re

from litestar.types import Message, Scope

from moiety_platform.randomness import random_hex

HEADER = "x-request-id"
MESSAGES_PATH = "/v1/messages"
MESSAGES_HEADER = "request-id"
_ON_OTHERS, _ON_MESSAGES = (HEADER,), (HEADER, MESSAGES_HEADER)
_STATE_KEY = "moiety_request_id"
_REASONABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")


def request_id_of(scope: Scope) -> str:
    """Return the request's id, which never changes during the request."""
    state = scope.setdefault("state", {})
    request_id = state.get(_STATE_KEY)
    if request_id is None:
        request_id = state[_STATE_KEY] = _offered(scope) or f"req_{random_hex(12)}"
    return str(request_id)


def _offered(scope: Scope) -> str | None:
    for name, value in scope["headers"]:
        if name == b"x-request-id":
            text = value.decode("latin-1")
            return text if _REASONABLE.fullmatch(text) else None
    return None


def id_headers(path: str, request_id: str) -> dict[str, str]:
    """Return the response headers with the id."""
    return dict.fromkeys(_ON_MESSAGES if path.startswith(MESSAGES_PATH) else _ON_OTHERS, request_id)


async def add_request_id(message: Message, scope: Scope) -> None:
    """Add the id headers. A `before_send` hook."""
    if message["type"] == "http.response.start":
        more = id_headers(scope["path"], request_id_of(scope))
        message["headers"] = [*message["headers"], *((k.encode(), v.encode("latin-1")) for k, v in more.items())]
