"""Maps external engines' errors to the platform's, with one table for HTTP statuses and error events of streams.

The server's message is for the operator only (`PlatformError.upstream`), and `cleaned` removes secrets from it. Clients
get the gateway's own messages, since the server's may contain internal addresses, keys and accounts.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

import msgspec

from moiety_platform.errors import (
    UNSUPPORTED_RESPONSE_FORMAT,
    BadRequest,
    ContextTooLong,
    EngineFailed,
    EngineOverloaded,
    EngineRefused,
    PlatformError,
    UpstreamError,
)
from moiety_platform.external_engines.dialect import count_of
from moiety_platform.redaction import redact_text

MAX_READ_CHARS = 4096  # of a message, before secrets are removed
MAX_MESSAGE_CHARS = 500
MIN_RETRY_S, MAX_RETRY_S = 1.0, 3600.0

OVERLOADED = (429, 503, 529)
ABOUT_REQUEST = (400, 413, 422)
TRANSIENT = (408, 425, 499)  # client errors that may be transient
STATUSES = {  # statuses of error events whose code is a word
    "context_length_exceeded": 400,
    "invalid_request_error": 400,
    "invalid_api_key": 401,
    "authentication_error": 401,
    "insufficient_quota": 402,
    "permission_error": 403,
    "model_not_found": 404,
    "not_found_error": 404,
    "rate_limit_exceeded": 429,
    "rate_limit_error": 429,
    "overloaded_error": 529,
}
QUOTA_EXHAUSTED = ("insufficient_quota", "billing_")
UNPAID_WORDS = "your credit balance is too low"  # beginning of Anthropic's message, with the status 400
PAYMENT_REQUIRED = 402
CONTEXT_WORDS = (
    "context length", "context size", "context window", "maximum model length", "max_model_len",
    "exceed_context_size", "context_length_exceeded", "prompt is too long",
)  # fmt: skip
FILTER_WORDS = ("content_filter", "content_policy", "responsibleaipolicy")
FORM_WORDS = ("grammar", "json schema", "json_schema", "structured output", "guided", "regex")
PARAMETERS = frozenset(
    {
        "temperature", "top_p", "top_k", "min_p", "seed", "stop", "logit_bias", "logprobs", "max_tokens", "min_tokens",
        "presence_penalty", "frequency_penalty", "repetition_penalty", "stop_token_ids", "ignore_eos",
        "allowed_token_ids", "bad_words", "include_stop_str_in_output", "max_completion_tokens", "reasoning_effort",
    }
)  # fmt: skip
_CONTEXT_SIZE = re.compile(r"(?:context (?:length|size|window)|model length)[^0-9]{0,40}(\d{1,9})")


def error_of_answer(status: int, body: bytes, headers: Mapping[str, str], now: datetime) -> PlatformError:
    """Return the platform's error for an unsuccessful HTTP answer."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        found = body.decode(errors="replace")
    error = found.get("error", found) if isinstance(found, dict) else found
    return _error_of(status, error, retry_seconds(headers.get("retry-after"), now))


def error_of_event(error: Any) -> PlatformError:
    """Return the platform's error for an error event of a stream."""
    status = 500
    if isinstance(error, dict):
        for told in (error.get("code"), error.get("status"), error.get("type")):
            number = count_of(told)
            if number is not None and 400 <= number < 600:
                status = number
                break
            if isinstance(told, str) and told in STATUSES:
                status = STATUSES[told]
                break
    return _error_of(status, error, None)


def ended_by_error(word: str) -> PlatformError:
    """Return the platform's error for a finish reason that means failure."""
    error = EngineFailed("the engine ended its answer with an error; send the request again")
    error.upstream = UpstreamError(200, f"finish_reason {word[:MAX_MESSAGE_CHARS]!r}")
    return error


def _error_of(status: int, error: Any, retry_after_s: float | None) -> PlatformError:
    message, kind, param = _words_of(error)
    made = _judged(status, message.lower(), kind.lower(), param, retry_after_s)
    made.upstream = UpstreamError(status, message)
    return made


def _judged(status: int, message: str, kind: str, param: str, retry_after_s: float | None) -> PlatformError:
    if status in OVERLOADED and not any(words in kind for words in QUOTA_EXHAUSTED):
        return EngineOverloaded(
            "the engine has no room now; try again later",
            retry_after_s=MIN_RETRY_S if retry_after_s is None else retry_after_s,
            asks_to_wait=retry_after_s is not None,
        )
    if message.startswith(UNPAID_WORDS):  # elsewhere it can be a quotation of the request
        status = PAYMENT_REQUIRED
    fault = _fault_of_request(message, kind, param) if status in ABOUT_REQUEST else None
    if fault is not None:
        return fault
    if 300 <= status < 500 and status not in TRANSIENT:
        advice = "sending it again does not help: ask the operator"
        return EngineRefused(f"the engine refuses the request with status {status}; {advice}", upstream_status=status)
    return EngineFailed(f"the engine answered with status {status}; send the request again")


def _fault_of_request(message: str, kind: str, param: str) -> BadRequest | None:
    """Return an error that the client can fix, if the server's message or fields identify one."""
    said = f"{message} {kind}"
    if any(words in said for words in CONTEXT_WORDS):
        return _context_too_long(message)
    if any(words in kind for words in FILTER_WORDS):
        return BadRequest("the engine's content filter refuses the prompt; change it", code="content_filter")
    if param in PARAMETERS:
        return BadRequest(f"the engine refuses the value of {param!r}; change it or leave it out", param=param)
    if any(words in said for words in FORM_WORDS):
        told = "the engine cannot follow the grammar, schema or expression of the answer; simplify it"
        return BadRequest(told, code=UNSUPPORTED_RESPONSE_FORMAT)
    return None


def _context_too_long(message: str) -> ContextTooLong:
    size = _CONTEXT_SIZE.search(message)
    most = "" if size is None else f" of {size[1]} tokens"
    return ContextTooLong(
        f"prompt is too long: the prompt and the output do not fit the maximum context length{most} of the engine. "
        "Shorten the prompt or lower max_tokens"
    )


def _words_of(error: Any) -> tuple[str, str, str]:
    """Return the message, the type and code, and the field name of an error in any format."""
    if isinstance(error, str):
        return error[:MAX_READ_CHARS], "", ""
    if not isinstance(error, dict):
        return "", "", ""
    message = error.get("message") or error.get("detail") or error.get("msg")
    kind = " ".join(str(word)[:100] for word in (error.get("type"), error.get("code")) if isinstance(word, str | int))
    param = error.get("param")
    text = message if isinstance(message, str) else "" if message is None else msgspec.json.encode(message).decode()
    return text[:MAX_READ_CHARS], kind, param if isinstance(param, str) else ""


def cleaned(upstream: UpstreamError, secrets: Iterable[str]) -> UpstreamError:
    """Return the error with its message in one line and without secrets.

    Removed are the given secrets and anything that looks like one.
    """
    message = redact_text(upstream.message[:MAX_READ_CHARS], secrets)
    shown = "".join(one if one.isprintable() else " " for one in message)
    return upstream._replace(message=shown[:MAX_MESSAGE_CHARS])


def retry_seconds(header: str | None, now: datetime) -> float | None:
    """Return the seconds of a Retry-After header: an integer, a decimal or a date. Any other value counts as absent."""
    if header is None or len(header) > 100:
        return None
    try:
        seconds = float(header)
    except ValueError:
        try:
            moment = parsedate_to_datetime(header)
        except (ValueError, OverflowError, IndexError, TypeError):
            return None
        seconds = (moment.replace(tzinfo=moment.tzinfo or UTC) - now).total_seconds()
    if not math.isfinite(seconds):
        return None
    return min(max(seconds, MIN_RETRY_S), MAX_RETRY_S)
