"""Everything the platform raises on purpose, and the one table from error to HTTP.

PlatformError
├── BadRequest              400  the request cannot be served as it stands
│   └── ContextTooLong      400  prompt + max_tokens do not fit the model's context
├── Unauthenticated         401  no key, or not one of ours
├── Forbidden               403  a good key that may not do this
├── NotFound                404  no such model, tenant, project or key
├── RequestTimeout          408  the client did not send it in time
├── Conflict                409  it exists already, or changed meanwhile
├── Gone                    410  it was there, and is not kept
├── PreconditionFailed      412  it is not what the request takes it for; nothing was changed
├── TooLarge                413  the body exceeds the limit
├── Unprocessable           422  it contradicts an earlier request
├── RateLimited             429  try again after `retry_after_s`
│   ├── RequestExceedsQuota 429  more than the whole cap of a limit: sending it again never helps
│   └── Overloaded          429  the class's promise cannot be kept now, or the tenant has too much in flight
├── HeadTooLarge            431  the request's line and headers exceed the limit
├── EngineFailed            502  the engine broke off the request
│   ├── EngineDied          502  the engine's process died, or cannot be reached any more
│   └── EngineRefused       502  an external engine refuses the request: sending it again does not help
├── NonFiniteOutput         502  the model computed NaN or infinity for the request
└── Unavailable             503  no engine, or the store is away; try again after `retry_after_s`
    └── EngineOverloaded    503  an external engine has no room now
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import ClassVar, NamedTuple

from moiety_wire.notes import Reason

CRASH_SUSPECTED = "engine_crash_suspected"  # the code of a request that may have ended the engine that computed it
UNSUPPORTED_RESPONSE_FORMAT = (
    "unsupported_response_format"  # the code of what an answer should be and cannot be made to be
)
NO_FORMS = "the engine of {model!r} cannot hold an answer to a form; leave the form out, or use another model"


class UpstreamError(NamedTuple):
    """The status and the message of an external engine's error, for the operator's log and trace only."""

    status: int
    message: str  # without secrets


class PlatformError(Exception):
    """Root. `code` is stable and machine-readable; `param` names the offending field of the request, if one does.
    `upstream` is the error of an external engine that this one was made from."""

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


class Unprocessable(PlatformError):
    status = 422
    type = "invalid_request_error"
    default_code = "unprocessable"


class RateLimited(PlatformError):
    """`headers` say where the limits stand, if one of them refused."""

    headers: Mapping[str, str] = MappingProxyType({})
    status = 429
    type = "rate_limit_error"
    default_code = "rate_limit_exceeded"


class RequestExceedsQuota(RateLimited):
    """The request needs more than the whole cap of a limit, so no wait makes room for it. It has no Retry-After."""

    default_code = "request_exceeds_quota"


class Overloaded(RateLimited):
    """`reason` is the scheduler's, or the gate's own."""

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


class HeadTooLarge(PlatformError):
    status = 431
    type = "invalid_request_error"
    default_code = "headers_too_large"


class EngineFailed(PlatformError):
    status = 502
    type = "server_error"
    default_code = "engine_failed"


class EngineDied(EngineFailed):
    """`in_first_step`: whether the engine was computing the request's first token as it died; None: not known."""

    def __init__(self, message: str, *, in_first_step: bool | None) -> None:
        super().__init__(message)
        self.in_first_step = in_first_step


class EngineRefused(EngineFailed):
    """`upstream_status` is the HTTP status of the refusal. It has no Retry-After, and clients are told not to retry."""

    default_code = "engine_refused"

    def __init__(self, message: str, *, upstream_status: int) -> None:
        super().__init__(message)
        self.upstream_status = upstream_status

    @property
    def blames_request(self) -> bool:
        """Whether the engine objects to what is asked, and not to who asks or to what it is set up for."""
        return self.upstream_status in (400, 413, 422)


class NonFiniteOutput(PlatformError):
    """No other engine is asked: it has the same weights. An answer of which nothing was sent is not billed."""

    status = 502
    type = "server_error"
    default_code = "non_finite_output"


class Unavailable(PlatformError):
    status = 503
    type = "server_error"
    default_code = "unavailable"


class EngineOverloaded(Unavailable):
    """`retry_after_s` is what the external engine said, if it `asks_to_wait`; else the least that clients are told."""

    default_code = "engine_overloaded"

    def __init__(self, message: str, *, retry_after_s: float, asks_to_wait: bool) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.asks_to_wait = asks_to_wait


WAIVED = (NonFiniteOutput, EngineRefused, EngineOverloaded)
"""Errors after which nothing is billed unless a part of the answer was sent."""


def forget_frames(error: BaseException) -> None:
    """Drop the tracebacks of an error that was handled, and of those that it came from. The calls that they hold often
    hold the error: together they would stay, with the request's text and tokens, until a garbage collection."""
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        found = pending.pop()
        if found is None or id(found) in seen:
            continue
        seen.add(id(found))
        found.__traceback__ = None
        pending += (found.__cause__, found.__context__)
