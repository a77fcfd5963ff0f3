"""Errors over HTTP: the formats of the APIs, of which OpenAI's is the default.

OpenAI's format is that of every route without another one, and of errors of the framework itself.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, NotRequired, Protocol, TypedDict

import msgspec
import structlog
from litestar import Request, Response
from litestar.exceptions import HTTPException

from moiety_platform.content_codings import CODINGS
from moiety_platform.errors import (
    EngineRefused,
    Overloaded,
    PlatformError,
    RateLimited,
    RequestExceedsQuota,
    UnsupportedContentCoding,
)
from moiety_platform.unserved_endpoints import ENDPOINT_NOT_SUPPORTED, advice_for

DEFAULT_RETRY_AFTER_S = 1
NO_RETRY_HEADER = "x-should-retry"  # OpenAI's and Anthropic's clients retry 429 and 5xx unless it is "false"
REASON_HEADER = "x-moiety-reason"
SCHEMA_PATH = "/schema"  # path of the OpenAPI documents, where the application's state enables them
HAS_SCHEMA = "has_schema"

log = structlog.get_logger(__name__)

_CODES = {
    400: ("invalid_request_error", "invalid_request"),
    401: ("authentication_error", "invalid_api_key"),
    403: ("permission_error", "forbidden"),
    404: ("invalid_request_error", "route_not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "request_too_large"),
}


class ErrorFields(TypedDict):
    """Fields of an error.

    `code` is stable; `param` names the offending field of the request, if there is one; `reason` says why there is no
    capacity.
    """

    message: str
    type: str
    param: str | None
    code: str
    reason: NotRequired[str]


class ErrorBody(TypedDict):
    """An error in OpenAI's format."""

    error: ErrorFields


class ErrorForm(Protocol):
    """Error format of an API.

    `request_id` is the one in the response's headers; `schema` is the type of a body, and `statuses` are those that
    only this API has.
    """

    schema: ClassVar[type]
    statuses: ClassVar[tuple[int, ...]]

    def status(self, error: PlatformError) -> int: ...

    def body(self, error: PlatformError, request_id: str) -> bytes: ...

    def event(self, error: PlatformError, request_id: str) -> bytes:
        """Return the last event of an aborted stream."""
        ...


class OpenAIErrors:
    """OpenAI's error format."""

    schema: ClassVar[type] = ErrorBody
    statuses: ClassVar[tuple[int, ...]] = ()

    def status(self, error: PlatformError) -> int:
        return error.status

    def body(self, error: PlatformError, request_id: str) -> bytes:
        return msgspec.json.encode(error_fields(error))

    def event(self, error: PlatformError, request_id: str) -> bytes:
        return b"data: " + msgspec.json.encode(error_fields(error)) + b"\n\n"


OPENAI_ERRORS = OpenAIErrors()


def error_fields(error: PlatformError) -> ErrorBody:
    """Return the body of an error response."""
    fields = _fields(error.message, error.type, error.param, error.code)
    if isinstance(error, Overloaded):
        fields["error"]["reason"] = error.reason.value
    return fields


def error_headers(error: PlatformError) -> dict[str, str]:
    """Return `Retry-After` where a retry makes sense, and the reason of the refusal."""
    if isinstance(error, RequestExceedsQuota):
        return {**error.headers, NO_RETRY_HEADER: "false"}
    if isinstance(error, UnsupportedContentCoding):
        return {"Accept-Encoding": ", ".join(CODINGS)}
    if isinstance(error, EngineRefused):
        return {NO_RETRY_HEADER: "false"}
    if error.status not in (429, 503) and error.retry_after_s is None:
        return {}
    wait_s = error.retry_after_s if error.retry_after_s is not None else DEFAULT_RETRY_AFTER_S
    headers = {"Retry-After": str(max(1, math.ceil(wait_s)))}
    if isinstance(error, Overloaded):
        headers[REASON_HEADER] = error.reason.value
    if isinstance(error, RateLimited):
        headers |= error.headers
    return headers


def answer_platform_error(_request: Request[Any, Any, Any], error: PlatformError) -> Response[bytes]:
    return _response(error.status, error_fields(error), error_headers(error))


def answer_framework_error(request: Request[Any, Any, Any], error: HTTPException) -> Response[bytes]:
    """Answer an error of Litestar: an unknown route, a wrong method, an invalid parameter of the admin API."""
    status = error.status_code
    if status >= 500:
        return answer_unexpected_error(request, error)
    kind, code = _CODES.get(status, ("invalid_request_error", "invalid_request"))
    path = request.scope["path"][:256]
    if status == 404 and (advice := advice_for(path)) is not None:
        message, code = f"{path} is not served: {advice}", ENDPOINT_NOT_SUPPORTED
    elif status == 404:
        message = f"there is no route {path}{_where_routes_are(request, 'for those that are')}"
    elif status == 405:
        message = f"{request.scope['method']} is not allowed on {path}{_where_routes_are(request, 'for what is')}"
    else:
        message = str(error.detail)
        extra = getattr(error, "extra", None)
        if isinstance(extra, list) and extra and isinstance(extra[0], dict):
            message = f"{message}: {extra[0].get('key', '')} {extra[0].get('message', '')}".rstrip()
    allow = {name: value for name, value in (error.headers or {}).items() if name.lower() == "allow"}
    return _response(status, _fields(message, kind, None, code), allow)


def _where_routes_are(request: Request[Any, Any, Any], purpose: str) -> str:
    return f"; see {SCHEMA_PATH} {purpose}" if request.app.state.get(HAS_SCHEMA) else ""


def answer_unexpected_error(_request: Request[Any, Any, Any], error: Exception) -> Response[bytes]:
    """Answer a defect in the code: logged in full, reported without detail."""
    log.error("unexpected_error", exc_info=error)
    return _response(500, error_fields(internal_error()), {})


def internal_error() -> PlatformError:
    return PlatformError(
        "the server failed to process this request, and logged the error. Try again, or ask the operator"
    )


def _fields(message: str, kind: str, param: str | None, code: str) -> ErrorBody:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _response(status: int, fields: ErrorBody, headers: dict[str, str]) -> Response[bytes]:
    return Response(msgspec.json.encode(fields), status_code=status, headers=headers, media_type="application/json")
