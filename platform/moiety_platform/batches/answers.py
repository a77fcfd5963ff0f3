"""Lines of output and error files, in OpenAI's shape. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from moiety_platform.errors import PlatformError
from moiety_platform.http_errors import error_fields

ID_PREFIX = "batch_req_"


def line_key(batch_id: str, number: int) -> str:
    """Return the key that the ids of a line contain; it is the same for each attempt."""
    return blake2b(f"{batch_id}/{number}".encode(), digest_size=16).hexdigest()


def answered(key: str, custom_id: str, request_id: str, body: Mapping[str, Any] | msgspec.Raw) -> bytes:
    """Return a line of the output file; `key` is the line's key."""
    return _line(key, custom_id, _response(200, request_id, body), None)


def refused(key: str, custom_id: str, request_id: str, error: PlatformError) -> bytes:
    """Return a line of the error file with the error that a live request would have received."""
    return _line(key, custom_id, _response(error.status, request_id, error_fields(error)), None)


def unanswered(key: str, custom_id: str, error: Mapping[str, str]) -> bytes:
    """Return a line of the error file for a request that was not answered before its batch ended."""
    return _line(key, custom_id, None, error)


def _response(status: int, request_id: str, body: Mapping[str, Any] | msgspec.Raw) -> dict[str, Any]:
    return {"status_code": status, "request_id": request_id, "body": body}


def _line(key: str, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, str] | None) -> bytes:
    return msgspec.json.encode({"id": ID_PREFIX + key, "custom_id": custom_id, "response": response, "error": error})
