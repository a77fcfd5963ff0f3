"""Head of an HTTP request: the checks of it, its fields, and its request id.

The checks are those that the parser leaves open and that servers could interpret differently (RFC 9110 and 9112). The
parser (llhttp) makes the other checks itself: docs/http.md lists every rule. The gateway reads few fields; it ignores
other claims of a client about itself (a tenant, a class, a priority, a cache salt).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from litestar.types import Message, Scope

from moiety_platform.errors import (
    BadRequest,
    ExpectationFailed,
    PlatformError,
    UnsupportedHttpVersion,
    UnsupportedTransferCoding,
)
from moiety_platform.randomness import random_hex

BAD_HTTP = "bad_http"
SINGLE = frozenset((b"host", b"content-length", b"content-type", b"authorization", b"x-api-key"))
"""Fields that may occur only once: framing, routing or authentication could read another one (RFC 9110, 5.3)."""

HEADER = "x-request-id"
MESSAGES_PATH = "/v1/messages"
VERSION_HEADER = (
    b"anthropic-version"  # of Anthropic's clients, which get their API's format where two APIs share a path
)
MESSAGES_HEADER = "request-id"
_ON_OTHERS, _ON_MESSAGES = (HEADER,), (HEADER, MESSAGES_HEADER)
_STATE_KEY = "moiety_request_id"
_REASONABLE = re.compile(r"[A-Za-z0-9._:/+=-]{1,128}")

_HOST = re.compile(rb"(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]*)?")
_ABSOLUTE = re.compile(rb"https?://[^/?#@\s]+/[^#]*", re.IGNORECASE)
_ASTERISK = b"*"

Fields = Sequence[tuple[bytes, bytes]]


def refusal_of(  # noqa: PLR0911  one line per rule
    method: str, target: bytes, version: str, fields: Fields
) -> PlatformError | None:
    """Return why a whole head is refused, or None. Names of fields are in lower case."""
    if version not in ("1.1", "1.0"):
        return _refusal_of_version(version)
    if (target[:1] != b"/" or b"#" in target) and not _is_other_form(method, target):
        return _bad("its target must be a path, or an http:// or https:// URL with one, and have no fragment (#…)")
    by_name = dict(fields)
    if len(by_name) != len(fields) and (repeated := _repeated(fields)):
        return _bad(f"it has more than one {repeated} field")
    host = by_name.get(b"host")
    if host is None and version == "1.1":
        return _bad("it has no Host field")
    if host is not None and _HOST.fullmatch(host) is None:
        return _bad("its Host field must be a name or an address, optionally with a port")
    if b"transfer-encoding" in by_name or b"expect" in by_name:
        return _refusal_of_coding(version, by_name) or _refusal_of_expectation(by_name)
    return None


def _refusal_of_version(version: str) -> PlatformError:
    if version.startswith("0"):
        return _bad("it names no version")
    return UnsupportedHttpVersion(f"HTTP/{version} is not supported here; use HTTP/1.1")


def _refusal_of_coding(version: str, by_name: Mapping[bytes, bytes]) -> PlatformError | None:
    coding = by_name.get(b"transfer-encoding")
    if coding is not None and version == "1.0":
        return _bad("HTTP/1.0 has no Transfer-Encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        return UnsupportedTransferCoding(
            "Only 'Transfer-Encoding: chunked' is supported; send the body without another encoding"
        )
    return None


def _refusal_of_expectation(by_name: Mapping[bytes, bytes]) -> PlatformError | None:
    if by_name.get(b"expect", b"100-continue").lower() != b"100-continue":
        return ExpectationFailed(
            "Only 'Expect: 100-continue' is supported; send the request without another expectation"
        )
    return None


def _is_other_form(method: str, target: bytes) -> bool:
    if target == _ASTERISK:
        return method == "OPTIONS"
    return _ABSOLUTE.fullmatch(target) is not None


def _repeated(fields: Fields) -> str | None:
    names = [name for name, _ in fields if name in SINGLE]
    return next((name.decode("ascii").title() for name in names if names.count(name) > 1), None)


def _bad(why: str) -> BadRequest:
    return BadRequest(f"This is not HTTP/1.1 as this server reads it: {why}; use an HTTP client", code=BAD_HTTP)


def fields_of(scope: Scope) -> dict[bytes, bytes]:
    """Return the header fields by lower-case name. Of several fields of a name, the first counts."""
    return dict([*scope["headers"]][::-1])


def coding_of(scope: Scope) -> str | None:
    """Return the request's content coding, None if there is none. Several are joined by commas."""
    given = []
    for name, value in scope["headers"]:
        if name == b"content-encoding":
            given.append(value.decode("latin-1"))
    if not given:
        return None
    codings = (part.strip().lower() for part in ",".join(given).split(","))
    return ", ".join(one for one in codings if one not in ("", "identity")) or None


def bearer_authorization(fields: Mapping[bytes, bytes]) -> str | None:
    """Return the client's credentials, in the form `Bearer KEY`."""
    value = fields.get(b"authorization")
    return None if value is None else value.decode("latin-1")


def api_key_authorization(fields: Mapping[bytes, bytes]) -> str | None:
    """Return the client's credentials. Anthropic's own header takes precedence over `Authorization`."""
    key = fields.get(b"x-api-key")
    return bearer_authorization(fields) if key is None else f"Bearer {key.decode('latin-1')}"


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
    """Add the id headers to a response without them. A `before_send` hook."""
    if message["type"] == "http.response.start" and HEADER.encode() not in dict(message["headers"]):
        more = id_headers(scope["path"], request_id_of(scope))
        message["headers"] = [*message["headers"], *((k.encode(), v.encode("latin-1")) for k, v in more.items())]
