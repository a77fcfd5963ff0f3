"""From a server's errors to the platform's."""

from __future__ import annotations

from typing import Any

import msgspec

from moiety_platform.errors import BadRequest, ContextTooLong, EngineFailed, Overloaded, PlatformError, Unavailable
from moiety_wire.notes import Reason

MAX_MESSAGE_LENGTH = 500
MAX_RETRY_S = 3600.0
CONTEXT_WORDS = ("context length", "context size", "maximum model length", "exceed_context_size")


def error_of_answer(status: int, body: bytes, retry_after: str | None = None) -> PlatformError:
    """For an HTTP answer that is no success."""
    try:
        found = msgspec.json.decode(body)
    except msgspec.DecodeError:
        found = None
    error = found.get("error", found) if isinstance(found, dict) else None
    return error_of(status, error, retry_after)


def error_of(status: int, error: Any, retry_after: str | None = None) -> PlatformError:
    """For a status, which may also stand in an event of a stream, and the object that describes it."""
    message, kind = "", ""
    if isinstance(error, dict):
        message, kind = str(error.get("message") or ""), str(error.get("type") or "")
    elif isinstance(error, str):
        message = error
    message = message[:MAX_MESSAGE_LENGTH]
    if status in (400, 413, 422):
        if any(words in f"{message} {kind}".lower() for words in CONTEXT_WORDS):
            return ContextTooLong(message or "the prompt and the output do not fit the model's context")
        return BadRequest(f"the engine cannot serve the request: {message or 'it does not say why'}")
    if status == 429:
        return Overloaded(
            "the engine is overloaded; try again shortly", Reason.QUEUE_FULL, retry_after_s=_seconds(retry_after)
        )
    if status == 503:
        return Unavailable(
            "the engine cannot take requests now; try again shortly", retry_after_s=_seconds(retry_after)
        )
    return EngineFailed(f"the engine answered with status {status}; send the request again")


def _seconds(retry_after: str | None) -> float:
    """Of a Retry-After header in seconds; its other form, a date, counts as none."""
    if retry_after is None or not (retry_after.isascii() and retry_after.isdigit()):
        return 1.0
    return min(max(float(retry_after), 1.0), MAX_RETRY_S)
