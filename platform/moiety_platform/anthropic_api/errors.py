"""Errors in Anthropic's format. `details` has our stable code as `error_code`, and `param` and `reason` if any."""

from __future__ import annotations

from typing import ClassVar, Literal, NotRequired, TypedDict

import msgspec

from moiety_platform.errors import Overloaded, PlatformError
from moiety_wire.notes import Reason

OVERLOADED_STATUS = 529

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
    request_id: str


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
        details: AnthropicErrorDetails = {"error_code": error.code}
        if error.param is not None:
            details["param"] = error.param
        if isinstance(error, Overloaded):
            details["reason"] = error.reason.value
        status = self.status(error)
        kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        fields: AnthropicErrorFields = {"type": kind, "message": error.message, "details": details}
        body: AnthropicErrorBody = {"type": "error", "error": fields, "request_id": request_id}
        return msgspec.json.encode(body)

    def event(self, error: PlatformError, request_id: str) -> bytes:
        return b"event: error\ndata: " + self.body(error, request_id) + b"\n\n"


ANTHROPIC_ERRORS = AnthropicErrors()
