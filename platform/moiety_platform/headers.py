"""Request headers, read from the raw scope.

The gateway reads few; it ignores other claims of a client about itself (a tenant, a class, a priority, a cache salt).
"""

from __future__ import annotations

from litestar.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """Return the first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def authorization_of(scope: Scope) -> str | None:
    """Return the client's credentials, in the form `Bearer KEY`."""
    return header_of(scope, b"authorization")
