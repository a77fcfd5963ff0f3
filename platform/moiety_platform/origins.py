"""Origins of web pages, as the setting `cors_allowed_origins` names them."""

from __future__ import annotations

import re

ANY_ORIGIN = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[a-z0-9._~\[\]:-]+")


def check_origin(origin: str) -> str:
    """Return the origin in lower case, as browsers send it. Raises ValueError."""
    lowered = origin.lower()
    if lowered != ANY_ORIGIN and _ORIGIN.fullmatch(lowered) is None:
        raise ValueError(
            f"the origin {origin!r} must be a scheme and a host, without a path, such as https://app.example.com, or *"
        )
    return lowered
