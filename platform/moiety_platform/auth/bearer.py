"""The API key in an Authorization header."""

from __future__ import annotations

from moiety_platform.auth.keys import KeyText, parse_key
from moiety_platform.errors import Unauthenticated

HOW_TO = "Send your key as 'Authorization: Bearer mty_…', or to /v1/messages as 'x-api-key: mty_…'."

_MAX_HEADER_LENGTH = 512


def read_key(authorization: str | None) -> KeyText:
    """Return the key, not yet verified. Raises Unauthenticated where the header has none."""
    if not authorization:
        raise Unauthenticated(f"There is no API key in this request. {HOW_TO}", code="missing_api_key")
    scheme, _, credential = authorization[:_MAX_HEADER_LENGTH].partition(" ")
    if scheme.lower() != "bearer":
        raise Unauthenticated(f"The Authorization header must use the Bearer scheme. {HOW_TO}")
    key = parse_key(credential.strip())
    if key is None:
        raise Unauthenticated(f"This is not the form of an API key of ours. Check that it is whole. {HOW_TO}")
    return key
