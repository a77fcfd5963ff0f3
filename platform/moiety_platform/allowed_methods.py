"""`Allow` header of `OPTIONS` responses, with all methods of a path.

The framework lists only those of the first route.
"""

from __future__ import annotations

from litestar.datastructures import MutableScopeHeaders
from litestar.routes import HTTPRoute
from litestar.types import Message, Scope


async def add_allow_header(message: Message, scope: Scope) -> None:
    """Set the `Allow` header. A `before_send` hook."""
    if message["type"] != "http.response.start" or message["status"] != 204 or scope.get("method") != "OPTIONS":
        return
    for route in scope["litestar_app"].routes:
        if isinstance(route, HTTPRoute) and route.path_format == scope["path_template"]:
            with_head = {"HEAD"} if "GET" in route.methods else set[str]()
            MutableScopeHeaders(message)["Allow"] = ", ".join(sorted(route.methods | with_head))
