"""All exceptions that the platform raises deliberately, and their HTTP statuses.

PlatformError
├── BadRequest                400  the request cannot be served as it is
│   └── ContextTooLong        400  prompt + max_tokens exceed the model's context
├── Unauthenticated           401  no key, or an unknown one
├── Forbidden                 403  a valid key without this permission
├── NotFound                  404  no such model, tenant, project or key
├── RequestTimeout            408  the client did not send it in time
├── Conflict                  409  it exists already, or changed meanwhile
├── Gone                      410  it existed, and is not kept
├── PreconditionFailed        412  the object is not in the expected state; nothing was changed
├── TooLarge                  413  the body exceeds the limit
├── UnsupportedContentCoding  415  an unsupported Content-Encoding
├── ExpectationFailed         417  an unsupported Expect header
├── Unprocessable             422  it contradicts an earlier request
├── RateLimited               429  try again after `retry_after_s`
│   ├── RequestExceedsQuota   429  more than the whole cap of a quota: a retry never helps
│   └── Overloaded            429  the class's SLO cannot be met now, or the tenant has too much in flight
├── HeadTooLarge              431  the request's line and headers exceed the limit
├── UnsupportedTransferCoding 501  an unsupported Transfer-Encoding
├── UnsupportedHttpVersion    505  an unsupported HTTP version
├── InsufficientStorage       507  the object store is full; nothing was stored
├── EngineFailed              502  the engine aborted the request
│   ├── EngineDied            502  the engine's process died, or cannot be reached any more
│   └── EngineRefused         502  an external engine refuses the request: a retry does not help
├── NonFiniteOutput           502  the model computed NaN or infinity for the request
└── Unavailable               503  no engine, or the store is down; try again after `retry_after_s`
    ├── EngineOverloaded      503  an external engine has no capacity now
    └── EnginesAsleep         503  all engines of the model sleep, or none is started
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from moiety_wire.trace_events import Reason

CRASH_SUSPECTED = "engine_crash_suspected"  # code for a request that may have crashed the engine that computed it
UNSUPPORTED_RESPONSE_FORMAT = (
    "unsupported_response_format"  # code for a response format that the engine cannot guarantee
)
STRUCTURED_OUTPUTS_UNAVAILABLE = (
    "structured outputs are not available for model {model!r}; leave them out, or use another model"
)


class UpstreamError(NamedTuple):
    """Status and message of an external engine's error, only for the operator's log and trace."""

    status: int
    message: str  # without secrets


class PlatformError(Exception):
    """Base class.

    `code` is stable and machine-readable; `param` names the offending field of the request, if there is one. `upstream`
    is the external engine's error that caused this one.
    """

    upstream: UpstreamError | None = None

    status: ClassVar[int] = 500
    type: ClassVar[str] = "server_error"
    default_code: ClassVar[str] = "internal_error"

    def __init__(
        self, message: str, *, code: str | None = None, param: str | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.param = param
        self.retry_after_s = retry_after_s


class BadRequest(PlatformError):
    status = 400
    type = "invalid_request_error"
    default_code = "invalid_request"


class ContextTooLong(BadRequest):
    default_code = "context_length_exceeded"


def prompt_too_long(num_tokens: str, max_prompt_tokens: int, max_context_tokens: int) -> ContextTooLong:
    """Return the error of a prompt with this number of tokens, in words.

    Coding agents shorten the conversation and try again where they find these words: those of Anthropic's API before
    the first period, and those of OpenAI's after it.
    """
    return ContextTooLong(
        f"prompt is too long: {num_tokens} tokens > {max_prompt_tokens} maximum. This model's maximum context length "
        f"is {max_context_tokens} tokens. Shorten the prompt"
    )


class Unauthenticated(PlatformError):
    status = 401
    type = "authentication_error"
    default_code = "invalid_api_key"


class Forbidden(PlatformError):
    status = 403
    type = "permission_error"
    default_code = "forbidden"


class NotFound(PlatformError):
    status = 404
    type = "invalid_request_error"
    default_code = "not_found"


class RequestTimeout(PlatformError):
    status = 408
    type = "invalid_request_error"
    default_code = "request_timeout"


class Conflict(PlatformError):
    status = 409
    type = "invalid_request_error"
    default_code = "conflict"


class Gone(PlatformError):
    status = 410
    type = "invalid_request_error"
    default_code = "gone"


class PreconditionFailed(PlatformError):
    status = 412
    type = "invalid_request_error"
    default_code = "precondition_failed"


class TooLarge(PlatformError):
    status = 413
    type = "invalid_request_error"
    default_code = "request_too_large"


class UnsupportedContentCoding(PlatformError):
    status = 415
    type = "invalid_request_error"
    default_code = "unsupported_content_encoding"


class Unprocessable(PlatformError):
    status = 422
    type = "invalid_request_error"
    default_code = "unprocessable"


class RateLimited(PlatformError):
    """A rate limit or quota refused the request. `headers` contain the state of the quotas, if one of them refused."""

    headers: Mapping[str, str] = MappingProxyType({})
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class RequestExceedsQuota(RateLimited):
    """The request needs more than the whole cap of a quota, so no wait helps. It has no Retry-After."""

    default_code = "request_exceeds_quota"


class Overloaded(RateLimited):
    """Admission control refused the request. `reason` is the scheduler's, or the admission gate's."""

    default_code = "overloaded"

    def __init__(self, message: str, reason: Reason, *, retry_after_s: float | None) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.reason = reason


class ExpectationFailed(PlatformError):
    status = 417
    type = "invalid_request_error"
    default_code = "expectation_failed"


class UnsupportedTransferCoding(PlatformError):
    status = 501
    type = "invalid_request_error"
    default_code = "unsupported_transfer_coding"


class UnsupportedHttpVersion(PlatformError):
    status = 505
    type = "invalid_request_error"
    default_code = "unsupported_http_version"


class InsufficientStorage(PlatformError):
    status = 507
    type = "server_error"
    default_code = "insufficient_storage"


class HeadTooLarge(PlatformError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class EngineFailed(PlatformError):
    status = 502
    type = "server_error"
    default_code = "engine_failed"


class EngineDied(EngineFailed):
    """The engine died during the request.

    `in_first_step` says whether the engine was computing the request's first token; None: unknown.
    """

    def __init__(self, message: str, *, in_first_step: bool | None) -> None:
        super().__init__(message)
        self.in_first_step = in_first_step


class EngineRefused(EngineFailed):
    """An external engine refused the request.

    `upstream_status` is the HTTP status of the refusal. It has no Retry-After, and clients are told not to retry.
    """

    default_code = "engine_refused"

    def __init__(self, message: str, *, upstream_status: int) -> None:
        super().__init__(message)
        self.upstream_status = upstream_status

    @property
    def blames_request(self) -> bool:
        """True if the refusal concerns the request itself, and not the credentials or the engine's configuration."""
        return self.upstream_status in (400, 413, 422)


class NonFiniteOutput(PlatformError):
    """The model computed NaN or infinity.

    There is no failover: other engines have the same weights. A response of which nothing was sent is not billed.
    """

    status = 502
    type = "server_error"
    default_code = "non_finite_output"


class Unavailable(PlatformError):
    status = 503
    type = "server_error"
    default_code = "unavailable"


class EngineOverloaded(Unavailable):
    """An external engine is overloaded.

    `retry_after_s` is the engine's own value, if it `asks_to_wait`; else the minimum for clients.
    """

    default_code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after_s: float, asks_to_wait: bool) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.asks_to_wait = asks_to_wait


class EnginesAsleep(Unavailable):
    """All engines of the model `model` sleep, or none of it is started.

    `note` is the number under which the waker counts the request as a demand; None if it does not.
    """

    def __init__(self, message: str, model: str, *, retry_after_s: float, note: int | None = None) -> None:
        super().__init__(message, code="no_engine", retry_after_s=retry_after_s)
        self.model = model
        self.note = note


WAIVED = (NonFiniteOutput, EngineRefused, EngineOverloaded)
"""Errors after which nothing is billed unless a part of the response was sent."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of a handled error and of its causes.

    Their frames often reference the error: the cycle would keep the request's text and tokens alive until a garbage
    collection.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = None
        pending += (found.__cause__, found.__context__)
