"""Errors in Anthropic's format. `details` has our stable code as `error_code`, and `param` and `reason` if any."""

from __future__ import annotations

from typing import Any, ClassVar, Literal, NotRequired, TypedDict

import msgspec
import structlog
from litestar import Request, Response

from moiety_platform.anthropic_api.rate_limit_headers import with_anthropic_headers
from moiety_platform.errors import Overloaded, PlatformError
from moiety_platform.http_errors import answer_platform_error, error_headers, internal_error
from moiety_platform.request_head import VERSION_HEADER, fields_of, request_id_of
from moiety_wire.trace_events import Reason

OVERLOADED_STATUS = 529

log = structlog.get_logger(__name__)

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    OVERLOADED_STATUS: "overloaded_error",
}


class AnthropicErrorDetails(TypedDict):
    """Details of an error. `error_code` is stable."""

    error_code: str
    param: NotRequired[str]
    reason: NotRequired[str]


class AnthropicErrorFields(TypedDict):
    """Type, message and details of an error."""

    type: str
    message: str
    details: AnthropicErrorDetails


class AnthropicErrorBody(TypedDict):
    """An error in Anthropic's format."""

    type: Literal["error"]
    error: AnthropicErrorFields
    request_id: str | None  # null for a request of a batch that was never begun


def anthropic_error_body(
    status: int, message: str, code: str, request_id: str | None, param: str | None = None
) -> AnthropicErrorBody:
    """Return the body of an error with that HTTP status."""
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details: AnthropicErrorDetails = {"error_code": code}
    if param is not None:
        details["param"] = param
    return {"type": "error", "error": {"type": kind, "message": message, "details": details}, "request_id": request_id}


class AnthropicErrors:
    """Encoder of every error under `/v1/messages`, as an answer or as a stream event."""

    schema: ClassVar[type] = AnthropicErrorBody
    statuses: ClassVar[tuple[int, ...]] = (OVERLOADED_STATUS,)

    def status(self, error: PlatformError) -> int:
        """Return 529 where the server is overloaded, 429 where the tenant has too many requests in flight."""
        if isinstance(error, Overloaded) and error.reason is not Reason.TENANT_QUEUE_FULL:
            return OVERLOADED_STATUS
        return error.status

    def body(self, error: PlatformError, request_id: str) -> bytes:
        body = anthropic_error_body(self.status(error), error.message, error.code, request_id, error.param)
        if isinstance(error, Overloaded):
            body["error"]["details"]["reason"] = error.reason.value
        return msgspec.json.encode(body)

    def event(self, error: PlatformError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


ANTHROPIC_ERRORS = AnthropicErrors()


def answer_anthropic_error(request: Request[Any, Any, Any], error: PlatformError) -> Response[bytes]:
    body = ANTHROPIC_ERRORS.body(error, request_id_of(request.scope))
    headers = with_anthropic_headers(error_headers(error))
    return Response(body, status_code=ANTHROPIC_ERRORS.status(error), headers=headers, media_type="application/json")


def answer_unexpected_anthropic(request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer an internal error: log it completely and send no details."""
    log.error("unexpected_error", exc_info=error)
    return answer_anthropic_error(request, internal_error())


def answer_error_of_version(request: Request[Any, Any, Any], error: PlatformError) -> Response[bytes]:
    """Answer an error in the format of the client's API, where two APIs share a path."""
    if VERSION_HEADER in fields_of(request.scope):
        return answer_anthropic_error(request, error)
    return answer_platform_error(request, error)
