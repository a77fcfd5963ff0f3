"""Request headers, read from the raw scope. The gateway reads few; what else a client claims about itself (a tenant, a
class, a priority, a cache salt) is read by nothing."""

from __future__ import annotations

from litestar.types import Scope


def header_of(scope: Scope, name: bytes) -> str | None:
    """The first header of that lower-case name."""
    for key, value in scope["headers"]:
        if key == name:
            return value.decode("latin-1")
    return None


def authorization_of(scope: Scope) -> str | None:
    """What the client says it is, in the form `Bearer KEY`."""
    return header_of(scope, b"authorization")
