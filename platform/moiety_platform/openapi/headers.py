"""Request and response headers by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from moiety_platform.openapi.tags_header import TAGS_HEADER, TAGS_PATTERN

_TEXT = {"type": "string"}
_NUMBER = {"type": "string", "pattern": "^[0-9]+$"}

IDEMPOTENCY_KEY = "Idempotency-Key"
QUOTE = "x-moiety-quote"
RECEIPT = "x-moiety-receipt"
SPOT_LIMIT = "x-moiety-spot-max-percent"
IF_MATCH = "If-Match"
ETAG = "ETag"
REQUEST_ID = "x-request-id"
MESSAGES_REQUEST_ID = "request-id"
RETRY_AFTER = "Retry-After"
REASON = "x-moiety-reason"
LENGTH = "Content-Length"

QUOTA_HEADERS = (
    "x-moiety-class",
    "x-moiety-admission",
    "x-moiety-spot-price",
    "x-moiety-ignored-fields",
    "x-moiety-adjusted-fields",
    "Idempotent-Replayed",
    *(f"x-ratelimit-{what}-{of}" for of in ("requests", "tokens") for what in ("limit", "remaining", "reset")),
    "RateLimit",
    "RateLimit-Policy",
)
"""Headers of answers from an engine."""

REQUEST: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        IDEMPOTENCY_KEY: {
            "description": "Use a new key for each request, and the same key for its repetitions. Repetitions get the "
            "first answer, and the request is charged once.",
            "schema": {"type": "string", "pattern": "^[!-~]{1,255}$"},
        },
        TAGS_HEADER: {
            "description": "Tags that are kept with the request's usage, such as `team=search, feature=chat`.",
            "schema": {"type": "string", "pattern": TAGS_PATTERN},
        },
        QUOTE: {
            "description": "Quote of this request by `/v1/quote`, which binds its class, price and guarantee.",
            "schema": {"type": "string", "pattern": "^mtq_[A-Za-z0-9_=-]{1,4000}$"},
        },
        RECEIPT: {
            "description": "Signs a receipt of this request, which `/v1/receipts/{request_id}` returns.",
            "schema": {"type": "string", "pattern": "^1(; salt=[0-9a-f]{32})?$"},
        },
        SPOT_LIMIT: {
            "description": "Highest spot price to accept, in percent of the class's price.",
            "schema": {"type": "string", "pattern": "^([1-9][0-9]?|100)$"},
        },
        IF_MATCH: {
            "description": "Expected ETags of the object, which is changed only if one matches. `*` matches any.",
            "schema": _TEXT,
        },
    }
)

ANSWER: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        REQUEST_ID: {
            "description": "The request's id: the `X-Request-Id` that was sent, if it is valid.",
            "schema": _TEXT,
        },
        MESSAGES_REQUEST_ID: {"description": "The request's id, under Anthropic's name.", "schema": _TEXT},
        RETRY_AFTER: {"description": "Seconds to wait before the next attempt.", "schema": _NUMBER},
        ETAG: {"description": "Version of the returned object, for `If-Match`.", "schema": _TEXT},
        LENGTH: {"description": "Bytes of the content.", "schema": _NUMBER},
        "x-moiety-class": {"description": "The service class that the request was served in.", "schema": _TEXT},
        "x-moiety-admission": {"description": "Reason code of the engine's admission decision.", "schema": _TEXT},
        "x-moiety-spot-price": {
            "description": "Price of a request of a spot class: percent of the class's price, dollars per million "
            "tokens, and the time until which it is valid.",
            "schema": _TEXT,
        },
        "x-moiety-ignored-fields": {
            "description": "Fields of the request that have no effect here, separated by commas.",
            "schema": _TEXT,
        },
        "x-moiety-adjusted-fields": {
            "description": "Fields of the request that were adjusted, each with the value used: `max_tokens=7500`.",
            "schema": _TEXT,
        },
        REASON: {"description": "Reason code of the rejection.", "schema": _TEXT},
        "Idempotent-Replayed": {
            "description": "Whether this is the answer of an earlier request.",
            "schema": {"const": "true"},
        },
        **{
            f"x-ratelimit-limit-{of}": {"description": f"The tightest limit of {of} a minute.", "schema": _NUMBER}
            for of in ("requests", "tokens")
        },
        **{
            f"x-ratelimit-remaining-{of}": {"description": f"Remaining part of that limit, in {of}.", "schema": _NUMBER}
            for of in ("requests", "tokens")
        },
        **{
            f"x-ratelimit-reset-{of}": {
                "description": "Time until that limit is fully refilled: 20ms, 1.5s, 6m0s.",
                "schema": _TEXT,
            }
            for of in ("requests", "tokens")
        },
        **{
            f"anthropic-ratelimit-{of}-limit": {
                "description": f"The tightest limit of {of} a minute.",
                "schema": _NUMBER,
            }
            for of in ("requests", "tokens")
        },
        **{
            f"anthropic-ratelimit-{of}-remaining": {
                "description": f"Remaining part of that limit, in {of}.",
                "schema": _NUMBER,
            }
            for of in ("requests", "tokens")
        },
        **{
            f"anthropic-ratelimit-{of}-reset": {
                "description": "Time at which that limit is fully refilled.",
                "schema": _TEXT,
            }
            for of in ("requests", "tokens")
        },
        "RateLimit": {"description": "Every limit's state: `r` is left, `t` seconds to its reset.", "schema": _TEXT},
        "RateLimit-Policy": {"description": "Every limit: `q` is its cap, `w` its window in seconds.", "schema": _TEXT},
    }
)

ALWAYS = (REQUEST_ID, MESSAGES_REQUEST_ID, RETRY_AFTER, ETAG, LENGTH)
"""Headers that are always present where they are documented."""


def reference(name: str) -> dict[str, str]:
    """Return a reference to the header's component."""
    return {"$ref": f"#/components/headers/{name}"}


def components() -> dict[str, Any]:
    """Return the components of all response headers."""
    return {name: {**header, "required": name in ALWAYS} for name, header in ANSWER.items()}
