"""Checks of a request's head that the parser leaves open and that servers could interpret differently. Pure.

RFC 9110 and 9112. The parser (llhttp) makes the other checks itself: docs/http.md lists every rule.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from moiety_platform.errors import (
    BadRequest,
    ExpectationFailed,
    PlatformError,
    UnsupportedHttpVersion,
    UnsupportedTransferCoding,
)

BAD_HTTP = "bad_http"
SINGLE = frozenset((b"host", b"content-length", b"content-type", b"authorization", b"x-api-key"))
"""Fields that may occur only once: framing, routing or authentication could read another one (RFC 9110, 5.3)."""

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
        return _bad(f"it may have one {repeated} field, and has more")
    host = by_name.get(b"host")
    if host is None and version == "1.1":
        return _bad("it has no Host field")
    if host is not None and _HOST.fullmatch(host) is None:
        return _bad("its Host field must be a name or an address, and a port if need be")
    if b"transfer-encoding" in by_name or b"expect" in by_name:
        return _refusal_of_coding(version, by_name) or _refusal_of_expectation(by_name)
    return None


def _refusal_of_version(version: str) -> PlatformError:
    if version.startswith("0"):
        return _bad("it names no version")
    return UnsupportedHttpVersion(f"HTTP/{version} is not understood here; use HTTP/1.1")


def _refusal_of_coding(version: str, by_name: Mapping[bytes, bytes]) -> PlatformError | None:
    coding = by_name.get(b"transfer-encoding")
    if coding is not None and version == "1.0":
        return _bad("HTTP/1.0 has no Transfer-Encoding")
    if coding is not None and coding.strip().lower() != b"chunked":
        return UnsupportedTransferCoding("Only 'Transfer-Encoding: chunked' is understood; send the body plainly")
    return None


def _refusal_of_expectation(by_name: Mapping[bytes, bytes]) -> PlatformError | None:
    if by_name.get(b"expect", b"100-continue").lower() != b"100-continue":
        return ExpectationFailed("Only 'Expect: 100-continue' is understood; send the request without another one")
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
